"""Kernels of a backward pass and the modules that they belong to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fusion_advisor.capture.graph.op_classes import class_of
from fusion_advisor.capture.trace.attribute import median_step
from fusion_advisor.capture.trace.events import read_events
from fusion_advisor.capture.trace.profiler import module_ranges, record
from fusion_advisor.capture.training import (
    MEAN_LOSS,
    OWN_LOSS,
    TrainingStep,
    in_training,
    join_modules,
    loss_of,
    without_history,
)
from fusion_advisor.errors import NotTrainable
from fusion_advisor.records import OpClass
from tests.capture.trace.test_events import event


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.drop(self.norm(x)) * 2


class Clipped(nn.Module):
    """Clips a weight in its forward pass."""

    def __init__(self):
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.linspace(-2, 2, 16)), nn.Parameter(torch.ones(16))

    def forward(self, x):
        self.weight.data.clamp_(-1, 1)
        return x * self.weight * self.other


@dataclass
class Result:
    """An output that is no container of torch's."""

    logits: torch.Tensor
    more: dict
    loss: torch.Tensor | None = None


def traced(model, *args, **kwargs):
    step = TrainingStep(model, args, kwargs, model_id="net")
    with in_training(model):
        step()
        with module_ranges(model, torch.profiler.record_function):
            trace = record(step, steps=1, on_cuda=False)
    found = median_step(trace, on_cuda=False)
    return found, join_modules(trace, found, step.loss)


def test_every_kernel_has_its_pass_and_its_module():
    step, training = traced(Net(), torch.randn(8, 16))
    rows = {row.path: row for row in training.modules}
    assert set(rows) == {"layers.*.0", "layers.*.1", "norm", "drop", ""}
    assert training.forward_ns + training.backward_ns == step.device_ns
    assert sum(row.forward_ns for row in training.modules) == training.forward_ns > 0
    assert sum(row.backward_ns for row in training.modules) == training.backward_ns > 0
    assert sum(row.launches for row in training.modules) == len(step.launches)
    # one GEMM forward; backward one for the weight and, where there is a layer before, one for the input, and the bias's sum
    linear, tanh = rows["layers.*.0"], rows["layers.*.1"]
    assert (linear.modules, tanh.modules, tanh.launches) == (3, 3, 6)
    assert linear.launches == 3 + (2 + 1) + 2 * (2 + 1) - 1
    assert all(row.forward_ns and row.backward_ns for row in rows.values())
    assert training.loss == MEAN_LOSS
    totals = [row.forward_ns + row.backward_ns for row in training.modules]
    assert totals == sorted(totals, reverse=True)


def test_what_is_computed_again_in_the_backward_pass_counts_there():
    class Checkpointed(Net):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)

    x = torch.randn(8, 16, requires_grad=True)
    step, training = traced(Checkpointed(), x)
    _, plain = traced(Net(), x)
    assert training.forward_ns + training.backward_ns == step.device_ns
    assert sum(row.launches for row in training.modules) > sum(row.launches for row in plain.modules)
    assert {row.path for row in training.modules if row.backward_ns} >= {"layers.*.0", "layers.*.1", "norm", "drop"}


def test_on_a_gpu_the_backward_pass_is_another_threads():
    """As CUDA gives it: autograd launches from a thread of its own, and kernels run later than their calls."""
    events = [event("user_annotation", "fa:step:0", 0.0, 1000.0, tid=1)]
    launched = [
        ("user", "fa:module:up", 10.0, 40.0, 1, None, None),
        ("forward", "aten::linear", 12.0, 20.0, 1, 5, "gemm_a"),
        ("user", "fa:module:up.act", 34.0, 14.0, 1, None, None),
        ("forward", "aten::gelu", 36.0, 10.0, 1, 6, "gelu"),
        ("forward", "aten::mean", 60.0, 10.0, 1, 7, "mean"),
        ("backward", "MeanBackward0", 100.0, 20.0, 2, 7, "div"),
        ("backward", "GeluBackward0", 130.0, 20.0, 2, 6, "gelu_backward"),
        ("backward", "AddmmBackward0", 160.0, 20.0, 2, 5, "gemm_b"),
        ("backward", "torch::autograd::AccumulateGrad", 190.0, 20.0, 2, -1, "add"),
    ]
    for number, (kind, name, at, width, thread, sequence, kernel) in enumerate(launched):
        if kind == "user":
            events.append(event("user_annotation", name, at, width, tid=thread))
            continue
        if kind == "backward":
            engine = f"autograd::engine::evaluate_function: {name}"
            events.append(event("cpu_op", engine, at - 1, width + 2, tid=thread, **{"Sequence number": sequence}))
        events += [
            event("cpu_op", name, at, width, tid=thread, **{"External id": number, "Sequence number": sequence}),
            event("cuda_runtime", "cudaLaunchKernel", at + 2, 3.0, tid=thread, correlation=number),
            event("kernel", kernel, 300.0 + 10 * number, 5.0, tid=7, correlation=number, stream=7, **{"External id": number}),
        ]
    trace = read_events(events)
    training = join_modules(trace, median_step(trace, on_cuda=True), "a loss")
    assert {row.path: (row.forward_ns, row.backward_ns) for row in training.modules} == {
        "up": (5000, 5000),
        "up.act": (5000, 5000),
        "": (5000, 10_000),
    }
    assert (training.forward_ns, training.backward_ns, training.loss) == (15_000, 20_000, "a loss")


def test_gradients_are_those_of_the_loss_and_made_anew():
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    step = TrainingStep(model, (x,), {}, model_id="net")
    step()
    step()
    expected = torch.autograd.grad(model(x).mean(), list(model.parameters()))
    assert all(torch.equal(parameter.grad, wanted) for parameter, wanted in zip(model.parameters(), expected, strict=True))


def test_the_loss():
    x = torch.ones(3, requires_grad=True)
    assert loss_of({"loss": x.sum(), "logits": x}) == (x.sum(), OWN_LOSS)
    half, two = x.to(torch.bfloat16) * 3, x * 2
    value, words = loss_of({"loss": None, "logits": half, "states": (two, torch.arange(3), torch.ones(2))})
    assert (value.item(), value.dtype, words) == (5.0, torch.float32, MEAN_LOSS)
    assert loss_of({"loss": torch.ones(3) * x, "logits": x})[1] == MEAN_LOSS  # a loss per example is no scalar
    with pytest.raises(NotTrainable, match="none of its floating-point outputs depends on a parameter"):
        loss_of({"loss": torch.ones(()), "ids": torch.arange(3)})


def test_the_loss_of_outputs_inside_an_object():
    x = torch.ones(3, requires_grad=True)
    value, words = loss_of(Result(x * 4, {"more": [x, "text"]}))
    assert (value.item(), words) == (5.0, MEAN_LOSS)
    assert loss_of(Result(x, {}, loss=x.sum()))[1] == OWN_LOSS


def test_a_parameter_that_the_forward_pass_writes_to_is_as_it_was():
    model = Clipped()
    before = model.weight.detach().clone()
    with in_training(model):
        TrainingStep(model, (torch.randn(8, 16),), {}, model_id="clipped")()
        assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, before) and model.other._version == 0


def test_a_model_is_as_it_was():
    model = Net().eval()
    model.layers[0].train()
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mine = model.norm.weight.grad = torch.ones(16)
    with pytest.raises(RuntimeError), in_training(model):
        assert all(module.training for module in model.modules())
        TrainingStep(model, (torch.randn(8, 16),), {}, model_id="net")()
        assert not torch.equal(model.norm.running_mean, before["norm.running_mean"])
        raise RuntimeError
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.norm.weight.grad is mine and torch.equal(mine, torch.ones(16))
    assert model.layers[0][0].weight.grad is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("native_layer_norm_backward", OpClass.REDUCTION),
        ("_softmax_backward_data", OpClass.REDUCTION),
        ("convolution_backward", OpClass.CONVOLUTION),
        ("embedding_dense_backward", OpClass.MEMORY),
        ("slice_backward", OpClass.MEMORY),
        ("gelu_backward", OpClass.POINTWISE),
        ("_scaled_dot_product_flash_attention_backward", OpClass.ATTENTION),
        ("nobody_knows_backward", OpClass.OTHER),
    ],
)
def test_an_op_of_the_backward_pass_is_of_its_forward_ops_class(name, expected):
    assert class_of(name) is expected


def test_a_buffer_that_a_step_gave_a_history_has_none_after():
    model = nn.Linear(4, 4)
    model.register_buffer("seen", torch.zeros(4))
    with in_training(model):
        model.seen.add_(model(torch.ones(2, 4)).mean(0))
        assert model.seen.requires_grad
    assert not model.seen.requires_grad and model.seen.tolist() == [0.0] * 4


def test_a_frozen_model_is_told_what_to_do():
    model = nn.Linear(4, 4).requires_grad_(requires_grad=False)
    with pytest.raises(NotTrainable, match=r"all of its parameters are frozen; call requires_grad_\(\)"):
        TrainingStep(model, (torch.ones(2, 4),), {}, model_id="m")()


def test_tensors_that_are_plain_attributes_are_as_they_were():
    """Keeps a memory bank in a plain attribute. Each step puts a new tensor into another."""
    model = nn.Linear(4, 4)
    model.bank, model.last, model.counts = torch.ones(600, 600), torch.zeros(4), True
    model.mask = torch.ones(1).expand(3)
    with torch.inference_mode():
        model.table = torch.ones(2)
    bank, last = model.bank, model.last
    with in_training(model):
        model.bank[0] = model(torch.ones(2, 4)).detach().mean()
        model.last, model.counts = torch.ones(4), False
    assert model.bank is bank and torch.equal(bank, torch.ones(600, 600))
    assert model.last is last and not model.counts


def test_a_call_without_history_is_another_view_of_the_same_numbers():
    model = nn.Linear(4, 4)
    leaf, given = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4)
    hidden = model(leaf)
    args, kwargs = without_history(model, (hidden, given, model.weight), {"again": hidden, "nested": [leaf], "flag": True})
    assert args[0].is_leaf and args[0].requires_grad and args[0].data_ptr() == hidden.data_ptr()
    assert args[0] is kwargs["again"] and args[1] is given and args[2] is model.weight and kwargs["flag"]
    assert kwargs["nested"][0] is not leaf and kwargs["nested"][0].data_ptr() == leaf.data_ptr()
    same = ((given,), {"nested": [given]})
    assert all(one is other for one, other in zip(without_history(model, *same), same, strict=True))


def test_steps_give_an_input_one_gradient():
    model, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    step = TrainingStep(model, (x,), {}, model_id="m")
    step()
    first = x.grad
    step()
    assert torch.equal(first, x.grad)
