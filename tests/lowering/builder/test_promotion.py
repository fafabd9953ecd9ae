"""Tensors without dims, and numbers, beside tensors of another dtype: torch rounds or cuts them before it compares."""

from __future__ import annotations

import itertools

import pytest
import torch

from fusion_advisor.ir.dtypes import DTYPES
from fusion_advisor.lowering.builder.promotion import common_dtype
from tests.kernel_cases.lowered import check, lower_function, records

SHAPES = ((2,), ())


class _Chain:
    """What a comparison's dtype is asked of."""

    def __init__(self, ops):
        self._ops = ops

    def meta(self, index):
        return self._ops[index].outputs[0]


def of(dtype, shape=(2,), value=1):
    return torch.full(shape, value, dtype=getattr(torch, dtype))


def own_dtype(function, *inputs):
    ops = records(function, *inputs)
    return common_dtype(_Chain(ops), next(op for op in ops if op.target.startswith("aten.lt")))


@pytest.mark.parametrize("left", DTYPES)
def test_two_tensors_are_compared_in_torch_s_dtype(left):
    for right, shapes in itertools.product(DTYPES, itertools.product(SHAPES, repeat=2)):
        inputs = of(left, shapes[0]), of(right, shapes[1])
        wanted = str(torch.result_type(*inputs)).removeprefix("torch.")
        assert own_dtype(lambda x, y: x < y, *inputs) == wanted, (right, shapes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_counts_for_the_least(dtype):
    for shape, number in itertools.product(SHAPES, (1, 0.5)):
        function = (lambda x: x < 1) if number == 1 else (lambda x: x < 0.5)
        wanted = str(torch.result_type(of(dtype, shape), number)).removeprefix("torch.")
        assert own_dtype(function, of(dtype, shape)) == wanted


@pytest.mark.parametrize("compare", [torch.eq, torch.gt, torch.le])
def test_float32_elements_are_compared_with_a_float64_rounded_to_float32(compare):
    inputs = torch.tensor([0.1, 0.2]), torch.tensor(0.1, dtype=torch.float64)
    program = lower_function(compare, *inputs)[0].program
    compared = next(value for value in program.values if value.dtype == "bool")
    assert {program.values[arg].dtype for arg in compared.args} == {"float32"}


@pytest.mark.parametrize(("dtype", "number"), [("uint8", 300), ("uint8", -1), ("int8", 300), ("int8", 128), ("int16", 70000)])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x < y,
        lambda x, y: y == x,
        torch.maximum,
        torch.minimum,
        lambda x, y: x.clamp(max=y),
        lambda x, y: torch.where(x > 3, x, y) / 2,
    ],
    ids=["lt", "eq", "maximum", "minimum", "clamp", "where"],
)
def test_an_integer_without_dims_is_cut_to_the_narrower_elements(dtype, number, function):
    info = torch.iinfo(getattr(torch, dtype))
    x = torch.tensor([info.min, info.max, 0, 44, 1], dtype=getattr(torch, dtype))
    check(function, x, torch.tensor(number), rtol=0, atol=0)


def test_integers_are_rounded_to_the_bfloat16_that_they_are_compared_with():
    program = lower_function(lambda x, y: x == y, torch.tensor([257, 256]), torch.tensor(256.0, dtype=torch.bfloat16))[0].program
    assert "round_bfloat16" in {value.op for value in program.values}
