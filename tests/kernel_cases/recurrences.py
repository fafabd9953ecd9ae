"""Loops over time as people write them, and what a kernel makes of each next to float64 and to eager's own error.

Run as a program (TRITON_INTERPRET=1 is set here) it prints name → complaint for Triton's interpreter; the tests run C++.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from fusion_advisor.capture.graph.retrace import trace
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.capture.loops.one_op import fold_loops
from fusion_advisor.fuse.scans.sites import find_scans
from fusion_advisor.fuse.stages.scan_kernels import HEADER, launcher_of

FEWEST = 8
"""Steps from which these tests take a loop for one."""


def mamba(delta, log_decay, source, read, value):
    """Mamba's selective scan; delta and value are (batch, channels, steps), source and read (batch, steps, state)."""
    decay = torch.exp(-torch.exp(log_decay)[None, :, None, :] * delta[..., None])
    added = delta[..., None] * source[:, None].to(delta.dtype) * value[..., None].to(delta.dtype)
    state = torch.zeros(delta.shape[0], *log_decay.shape, dtype=read.dtype)
    rows = []
    for step in range(delta.shape[2]):
        state = decay[:, :, step] * state + added[:, :, step]
        rows.append(torch.matmul(state.to(read.dtype), read[:, step].unsqueeze(-1))[:, :, 0])
    return torch.stack(rows, -1), state


def mamba_rows(delta, log_decay, source, read, value):
    """The same without its last state."""
    return mamba(delta, log_decay, source, read, value)[0]


def average(x, weight):
    """An exponential moving average from the first element on."""
    state, rows = x[:, 0], []
    for step in range(x.shape[1]):
        state = weight * state + (1 - weight) * x[:, step]
        rows.append(state)
    return torch.stack(rows, 1)


def gated(x, gates, start):
    """Gates that come out of sigmoids, a state that is given, and steps along dim 0."""
    state, rows = start, []
    for now, gate in zip(x.unbind(0), gates.unbind(0), strict=True):
        state = torch.sigmoid(gate) * state + torch.tanh(now)
        rows.append(torch.nn.functional.silu(state) * now)
    return torch.stack(rows, 0), state


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def mamba_inputs(batch, channels, steps, states, dtype):
    return (
        normal(batch, channels, steps).abs() * 0.3, normal(channels, states) * 0.3, normal(batch, steps, states, dtype=dtype),
        normal(batch, steps, states, dtype=dtype, seed=1), normal(batch, channels, steps, dtype=dtype, seed=2),
    )  # fmt: skip


def turned(tensor):
    """The same numbers with the dims in another order in memory, and a hole after each."""
    wide = torch.zeros(*tensor.shape[::-1], 2, dtype=tensor.dtype)
    wide[..., 0] = tensor.permute(*reversed(range(tensor.dim())))
    return wide[..., 0].permute(*reversed(range(tensor.dim())))


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASES = {
    "mamba": (mamba, mamba_inputs(2, 7, 13, 5, F32)),
    "mamba bf16": (mamba, mamba_inputs(2, 7, 13, 5, BF16)),
    "mamba fp16, 16 states": (mamba_rows, mamba_inputs(1, 33, 9, 16, F16)),
    "mamba, rows alone": (mamba_rows, mamba_inputs(3, 5, 12, 8, F32)),
    "mamba, one channel": (mamba, mamba_inputs(1, 1, 10, 4, F32)),
    "mamba, turned": (mamba, tuple(turned(one) for one in mamba_inputs(2, 6, 11, 3, F32))),
    "average": (average, (normal(3, 17, 33), torch.rand(33))),
    "average bf16": (average, (normal(2, 9, 5, dtype=BF16), torch.rand(5).to(BF16))),
    "average, turned": (average, (turned(normal(3, 10, 7)), torch.rand(7))),
    "gated": (gated, (normal(12, 2, 9), normal(12, 2, 9, seed=1), normal(2, 9, seed=2))),
    "gated fp16": (gated, (normal(8, 3, 5, dtype=F16), normal(8, 3, 5, dtype=F16, seed=1), normal(3, 5, dtype=F16))),
}


@dataclass(frozen=True)
class Folded:
    """A function's graph with its loop as one op."""

    region: Region
    found: list


def folded(function, inputs, fewest=FEWEST):
    graph = trace(function, list(inputs))
    region = Region(index=0, graph=graph, original=graph)
    fold_loops(SimpleNamespace(regions=[region]), fewest)
    return Folded(region=region, found=find_scans(region))


class _Values(torch.fx.Interpreter):
    def __init__(self, graph):
        super().__init__(graph)
        self.values = {}

    def run_node(self, node):
        self.values[node] = super().run_node(node)
        return self.values[node]


def outputs_of(maker, function, inputs, steps=None):
    """What a kernel makes of a function's loop, the rows first; the rest of the function is not run."""
    one = folded(function, inputs)
    (site,) = one.found
    recurrence = site.recurrence
    if steps is not None:
        recurrence = replace(recurrence, program=replace(recurrence.program, dims=(steps, *recurrence.program.dims[1:])))
    runner = _Values(one.region.graph)
    runner.run(*inputs)
    given = [runner.values[node] for node in dict.fromkeys((*site.inputs, *site.inputs_before))]
    results = [torch.full_like(runner.values[node], float("nan")) for node in site.outputs]
    dtypes = [result.dtype for result in results]
    if maker.name == "triton":  # the interpreter cuts bfloat16 off where a GPU rounds it: it stores float32, and torch rounds
        results = [result.float() if result.dtype == torch.bfloat16 else result for result in results]
    rendered = maker.render(recurrence, HEADER)
    with tempfile.TemporaryDirectory() as folder:
        launch = launcher_of(site, maker.build(rendered, Path(folder) / f"kernel{rendered.suffix}").bind(recurrence))
        launch(*given, *results)
    return [result.to(dtype) for result, dtype in zip(results, dtypes, strict=True)]


def complaint(maker, name):
    """What is wrong with a kernel's numbers; empty where it is as near to float64 as the ops one by one."""
    function, inputs = CASES[name]
    eager = function(*inputs)
    eager = eager if isinstance(eager, tuple) else (eager,)
    truth = function(*(one.double() for one in inputs))
    truth = truth if isinstance(truth, tuple) else (truth,)
    found = outputs_of(maker, function, inputs)
    if len(found) != len(eager):
        return f"{len(found)} results for {len(eager)}"
    for own, other, exact in zip(found, eager, truth, strict=True):
        mine, its = (float((one.double() - exact).abs().max()) for one in (own, other))
        limit = 1.5 * its + 2 * torch.finfo(own.dtype).eps * float(exact.abs().max())
        if own.shape != other.shape or own.stride() != other.stride() or own.dtype != other.dtype or not mine <= limit:
            return f"off by {mine:.3g}, eager by {its:.3g}"
    return ""


if __name__ == "__main__":
    from fusion_advisor.codegen.recurrence.triton import TritonRecurrences

    for case in sys.argv[1:] or CASES:
        sys.stdout.write(f"{case} → {complaint(TritonRecurrences(), case)}\n")
