"""Gradients of activations, dropout and softmax against torch's own ops in fp64, at the kinks and at special values too."""

from __future__ import annotations

import math

import pytest
import torch

from fusion_advisor.ir.dtypes import CannotLower
from fusion_advisor.lowering.rules.backward import BACKWARD, ROWS_BACKWARD
from tests.kernel_cases.lowered import check, lower_function

_aten = torch.ops.aten
ACTIVATIONS = {
    "tanh_backward": _aten.tanh_backward,
    "sigmoid_backward": _aten.sigmoid_backward,
    "silu_backward": _aten.silu_backward,
    "gelu_backward": lambda g, x: _aten.gelu_backward(g, x, approximate="none"),
    "gelu_backward_tanh": lambda g, x: _aten.gelu_backward(g, x, approximate="tanh"),
    "threshold_backward": lambda g, x: _aten.threshold_backward(g, x, 0),
    "threshold_backward_at": lambda g, x: _aten.threshold_backward(g, x, 0.5),
    "leaky_relu_backward": lambda g, x: _aten.leaky_relu_backward(g, x, 0.2, False),
    "hardtanh_backward": lambda g, x: _aten.hardtanh_backward(g, x, -1.0, 1.0),
    "hardtanh_backward_relu6": lambda g, x: _aten.hardtanh_backward(g, x, 0.0, 6.0),
    "hardsigmoid_backward": _aten.hardsigmoid_backward,
    "elu_backward": lambda g, x: _aten.elu_backward(g, 0.7, 1.1, 1.2, False, x),
    "elu_backward_of_result": lambda g, x: _aten.elu_backward(g, 0.7, 1.1, 1.2, True, x),
    "softplus_backward": lambda g, x: _aten.softplus_backward(g, x, 1.0, 20.0),
    "softplus_backward_beta": lambda g, x: _aten.softplus_backward(g, x, 2.5, 3.0),
    "native_dropout_backward": lambda g, x: _aten.native_dropout_backward(g, x > 0, 1.25),
}
RTOL = {"hardsigmoid_backward": 1e-7}
"""Torch's own sixth is an fp32 number."""
KINKS = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -3.0, 6.0, 20.0, 21.0, 1e-30, 300.0, -300.0]


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_every_rule_is_tested():
    tested = {name.partition("_backward")[0] + "_backward" for name in ACTIVATIONS}
    assert tested == set(BACKWARD)
    assert set(ROWS_BACKWARD) == {"_softmax_backward_data", "_log_softmax_backward_data", "nll_loss_backward"}


@pytest.mark.parametrize("shape", [(3, 5), (1, 7), (2, 3, 4), (6,)], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation(name, shape):
    check(ACTIVATIONS[name], drawn(*shape), 3 * drawn(*shape, seed=1), rtol=RTOL.get(name, 1e-12))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_at_its_kinks(name):
    values = torch.tensor(KINKS, dtype=torch.float64)
    check(ACTIVATIONS[name], drawn(len(KINKS)), values, rtol=RTOL.get(name, 1e-12))


@pytest.mark.parametrize("name", ["tanh_backward", "sigmoid_backward", "threshold_backward", "leaky_relu_backward"])
def test_numbers_that_are_none(name):
    values = torch.tensor([math.inf, -math.inf, math.nan, 1.0], dtype=torch.float64)
    check(ACTIVATIONS[name], torch.tensor([1.0, 1.0, 1.0, math.nan], dtype=torch.float64), values)


@pytest.mark.parametrize("name", ["hardtanh_backward", "hardtanh_backward_relu6", "elu_backward"])
def test_nan_where_a_cpus_vectors_and_single_elements_differ(name):
    """Most elements lie in vectors; MobileNet's backward pass lost 20 kernels of 60 to what the others have there."""
    values = torch.full((8, 16), math.nan, dtype=torch.float64)
    gradients = drawn(8, 16)
    gradients[0, :2] = torch.tensor([math.nan, math.inf])
    check(ACTIVATIONS[name], gradients, values)


def test_gradients_are_broadcast():
    check(lambda g, x: _aten.tanh_backward(g.expand(4, 6), x), drawn(1, 6), drawn(4, 6, seed=1))


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 8), (4, 1)], ids=str)
@pytest.mark.parametrize("is_log", [False, True])
def test_a_softmax(is_log, shape):
    if is_log:
        check(lambda g, x: _aten._log_softmax_backward_data(g, x, -1, torch.float64), drawn(*shape), drawn(*shape, seed=1))
    else:
        check(lambda g, x: _aten._softmax_backward_data(g, x, -1, torch.float64), drawn(*shape), drawn(*shape, seed=1))


def test_a_softmax_read_at_another_place():
    check(
        lambda g, x: _aten._softmax_backward_data(g, x, -1, torch.float64).transpose(0, 1) * 2.0,
        drawn(4, 3, 8), drawn(4, 3, 8, seed=1),
    )  # fmt: skip


def test_scores_that_were_scaled_and_masked():
    def scores(g, x, mask):
        return _aten._softmax_backward_data(g, x, -1, torch.float64).masked_fill(mask, 0.0) * 0.125

    check(scores, drawn(2, 4, 8), drawn(2, 4, 8, seed=1).softmax(-1), drawn(2, 4, 8, seed=2) > 0)


@pytest.mark.parametrize("shape", [(5, 7), (1, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("reduction", [0, 1, 2], ids=["none", "mean", "sum"])
def test_a_loss_has_its_gradient_at_the_target(reduction, shape):
    rows, classes = shape
    target = torch.arange(rows) * 3 % classes
    target[rows // 2 :: 2] = -100
    gradient = drawn(rows, seed=2) if reduction == 0 else drawn(1, seed=2).reshape(())
    logs, total = drawn(*shape).log_softmax(-1), (target != -100).sum().double()
    program = check(
        lambda g, x, t, w: _aten.nll_loss_backward(g, x, t, None, reduction, -100, w), gradient, logs, target, total
    )  # fmt: skip
    read = [operand.element_count for operand in program.operands if not operand.is_output]
    assert max(read) <= rows  # of the logarithms only the shape


def test_the_gradient_of_cross_entropy_reads_the_logits_logarithms_once():
    def logits_gradient(g, x, t, w):
        loss = _aten.nll_loss_backward(g, x, t, None, 1, 2, w)
        return _aten._log_softmax_backward_data(loss, x, 1, torch.float64).to(torch.float32)

    target = torch.tensor([0, 2, 4, 2, 1, 3])
    logs, one = drawn(6, 5).log_softmax(-1), torch.ones((), dtype=torch.float64)
    program = check(logits_gradient, one, logs, target, 4 * one, rtol=1e-6, atol=1e-7)
    assert program.moved_bytes == 6 * 5 * (8 + 4) + 6 * 8 + 8 + 8


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda g, x: _aten.native_dropout_backward(g, x, 0.5), (torch.ones(3, dtype=torch.uint8), torch.ones(3).half())),
        (_aten.tanh_backward, (torch.ones(3).half(), torch.ones(3))),
        (lambda g, x: _aten._log_softmax_backward_data(g, x, 0, torch.float32), (torch.ones(()), torch.ones(()))),
    ],
    ids=["integers", "two dtypes", "a single number"],
)
def test_what_autograd_never_passes_is_refused(function, inputs):
    with pytest.raises(CannotLower):
        lower_function(function, *inputs)
