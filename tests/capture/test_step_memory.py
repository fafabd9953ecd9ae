"""Memory of a training step over its time, from an allocator's record."""

from __future__ import annotations

import torch
from torch import nn

from fusion_advisor.capture.step_memory import record_step_memory, step_memory
from fusion_advisor.capture.trace.events import Event, Trace
from fusion_advisor.capture.trace.profiler import Allocation, module_ranges

THREAD = "1/1"


def event(name, start_ns, duration_ns, sequence=-1):
    return Event(name=name, start_ns=start_ns, duration_ns=duration_ns, thread=THREAD, sequence=sequence)


def trace():
    """A product in the forward pass, its gradient in the backward pass."""
    return Trace(
        kernels=(), launches=(),
        ranges=(event("fa:step:0", 100, 100), event("fa:module:layers.3.up", 110, 20)),
        cpu_ops=(
            event("aten::mm", 112, 10, sequence=7), event("aten::empty", 113, 1),
            event("autograd::engine::evaluate_function: MmBackward0", 150, 30, sequence=7), event("aten::mm", 152, 10),
        ),
    )  # fmt: skip


def allocation(moment_ns, address, change_bytes):
    return Allocation(moment_ns=moment_ns, address=address, change_bytes=change_bytes)


def test_each_tensor_is_an_activation_a_gradient_or_working_memory():
    record = [
        allocation(50, 1, 999), allocation(113, 2, 100), allocation(155, 3, 40), allocation(156, 4, 7),
        allocation(160, 1, -999), allocation(170, 2, -100), allocation(171, 4, -7), allocation(250, 5, 1),
    ]  # fmt: skip
    found = step_memory(trace(), record, label="eager")
    assert found.peak_bytes == 147 and found.peak_share == 0.56 and found.backward_share == 0.55
    held = {(row.kind, row.op, row.module, row.held_bytes) for row in found.holders}
    assert held == {
        ("activation", "mm", "layers.*.up", 100), ("gradient", "mm", "layers.*.up", 40), ("working", "mm", "layers.*.up", 7),
    }  # fmt: skip
    assert (found.activation_bytes[-1], found.gradient_bytes[-1], found.working_bytes[-1]) == (0, 40, 0)


def test_a_step_without_allocations_is_none():
    assert step_memory(trace(), [allocation(50, 1, 999)], label="eager") is None


def test_a_real_steps_gradients_are_as_large_as_its_parameters():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(32, 64)

    def step():
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    step()
    found = record_step_memory(
        step, label="eager", on_cuda=False, ranges=lambda: module_ranges(model, torch.profiler.record_function)
    )
    assert found.gradient_bytes[-1] == sum(parameter.nbytes for parameter in model.parameters())
    assert max(found.activation_bytes) >= 3 * 32 * 256 and found.activation_bytes[-1] < 100
    assert any(row.module == "1" and row.op == "gelu" for row in found.holders)
    assert found.peak_bytes == sum(row.held_bytes for row in found.holders)
