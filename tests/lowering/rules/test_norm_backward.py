"""Layer norm with its statistics, and its gradients: row by row and column by column, against torch's own op in fp64."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.ir.dtypes import CannotLower
from tests.kernel_cases.lowered import check, lower_function
from tests.lowering.rules.test_backward import drawn

_aten = torch.ops.aten
SHAPES = [((3, 8), 1), ((2, 5, 7), 1), ((1, 6), 1), ((4, 1), 1), ((2, 3, 4, 5), 2), ((4, 4), 1)]


def norm_case(shape, dims, *, has_weight=True):
    """Inputs of a layer norm over the last dims, its results, and a gradient."""
    normalized = shape[len(shape) - dims :]
    x, gradient = 2 * drawn(*shape) + 1, drawn(*shape, seed=1)
    weight, bias = (drawn(*normalized, seed=2), drawn(*normalized, seed=3)) if has_weight else (None, None)
    _, mean, rstd = _aten.native_layer_norm(x, normalized, weight, bias, 1e-5)
    return list(normalized), x, gradient, weight, bias, mean, rstd


@pytest.mark.parametrize(("shape", "dims"), SHAPES, ids=str)
@pytest.mark.parametrize("has_weight", [True, False])
def test_a_norm_with_its_statistics(shape, dims, has_weight):
    normalized, x, other, weight, bias, _, _ = norm_case(shape, dims, has_weight=has_weight)
    given = [x, other, *([weight, bias] if has_weight else [])]

    def function(x, y, *affine):
        total = x + y
        return (total, *_aten.native_layer_norm(total, normalized, *(affine or (None, None)), 1e-5))

    check(function, *given, rtol=1e-9, atol=1e-9)


def backward(normalized, mask):
    def function(g, x, mean, rstd, *affine):
        found = _aten.native_layer_norm_backward(g, x, normalized, mean, rstd, *(affine or (None, None)), mask)
        return tuple(one for one, is_wanted in zip(found, mask, strict=True) if is_wanted)

    return function


@pytest.mark.parametrize(("shape", "dims"), SHAPES, ids=str)
@pytest.mark.parametrize("has_weight", [True, False])
def test_the_inputs_gradient(shape, dims, has_weight):
    normalized, x, gradient, weight, bias, mean, rstd = norm_case(shape, dims, has_weight=has_weight)
    given = [gradient, x, mean, rstd, *([weight, bias] if has_weight else [])]
    program = check(backward(normalized, [True, False, False]), *given, rtol=1e-9, atol=1e-9)
    elements = x.numel()
    assert sum(operand.element_count == elements for operand in program.operands) >= 3  # gradient, input and result, once each


def test_the_inputs_gradient_between_an_add_and_a_cast():
    normalized, x, gradient, weight, bias, mean, rstd = norm_case((2, 5, 7), 1)

    def function(g, other, x, mean, rstd, weight, bias):
        found = _aten.native_layer_norm_backward(g + other, x, normalized, mean, rstd, weight, bias, [True, False, False])[0]
        return (found + other).to(torch.float32)

    check(function, gradient, x * 0.5, x, mean, rstd, weight, bias, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("shape", "dims"), SHAPES, ids=str)
@pytest.mark.parametrize("mask", [[False, True, True], [False, True, False]], ids=["both", "weight"])
def test_the_weights_gradients_are_sums_of_columns(shape, dims, mask):
    normalized, x, gradient, weight, bias, mean, rstd = norm_case(shape, dims)
    program = check(backward(normalized, mask), gradient, x, mean, rstd, weight, bias, rtol=1e-9, atol=1e-9)
    assert program.is_reduced


def test_all_three_are_no_one_kernel():
    normalized, x, gradient, weight, bias, mean, rstd = norm_case((3, 8), 1)
    with pytest.raises(CannotLower, match="different dims"):
        lower_function(backward(normalized, [True, True, True]), gradient, x, mean, rstd, weight, bias)


def test_mixed_dtypes_are_refused():
    normalized, x, gradient, weight, bias, mean, rstd = norm_case((3, 8), 1)
    with pytest.raises(CannotLower, match="mixed dtypes"):
        lower_function(
            backward(normalized, [True, False, False]), gradient.float(), x.float(), mean.float(), rstd.float(), weight, bias
        )


COLUMNS = {
    "sum": lambda x: x.sum(0),
    "keepdim": lambda x: x.sum(0, keepdim=True),
    "mean": lambda x: x.mean(0),
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin((0,)),
    "negative": lambda x: x.sum(-x.dim()),
    "of a product": lambda x: (x * x.exp()).sum(0),
    "with its elements": lambda x: ((y := x * 2 + 1), y.sum(0)),
    "two": lambda x: (x.sum(0), x.square().sum(0)),
    "then a cast": lambda x: (x.sum(0) * 0.5).to(torch.float32).to(torch.float64),
    "of a transpose": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1).sum(0),
}


@pytest.mark.parametrize("shape", [(5, 8), (8, 8), (1, 6), (6, 1), (1, 1), (3, 3, 3), (2, 1, 4)], ids=str)
@pytest.mark.parametrize("name", COLUMNS)
def test_columns(name, shape):
    check(COLUMNS[name], drawn(*shape), rtol=1e-6 if "cast" in name else 1e-12)


@pytest.mark.parametrize("shape", [(4, 3, 8), (4, 4, 4), (1, 1, 5), (2, 1, 3)], ids=str)
def test_columns_of_several_leading_dims(shape):
    check(lambda x, y: ((x * y).sum((0, 1)), x.sum([0, 1], keepdim=True)), drawn(*shape), drawn(*shape, seed=1))
    check(lambda x: x.reshape(-1, shape[-1]).sum(0), drawn(*shape))


def test_columns_of_what_is_not_contiguous():
    x = drawn(6, 10)[:, 2:9:2]
    check(lambda x: x.sum(0), x)
    check(lambda x: (x.t() * 2).sum(0), drawn(6, 10))
    check(lambda x, y: (x + y).sum(0), drawn(1, 10).expand(6, 10), drawn(6, 1).expand(6, 10))


def test_no_rows_are_left_to_torch():
    with pytest.raises(CannotLower, match="reduces a shape"):
        lower_function(lambda x: x.sum(0), drawn(0, 8))


def test_what_elements_do_with_their_columns_sum_is_no_part_of_it():
    with pytest.raises(CannotLower, match="kernel of its own"):
        lower_function(lambda x: x - x.mean(0), drawn(5, 8))


def test_rows_and_columns_are_no_one_kernel():
    with pytest.raises(CannotLower, match="depends on the reduced dim"):
        lower_function(lambda x: (x.sum(0), x.sum(1)), drawn(8, 8))
