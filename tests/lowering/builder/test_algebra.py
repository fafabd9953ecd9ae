"""Algebra on constants: powers of two are moved only where no number that float32 holds is lost on the way."""

from __future__ import annotations

import math

import pytest

from fusion_advisor.ir.program import Value
from fusion_advisor.lowering.builder.values import Values


@pytest.fixture
def values():
    return Values(is_exact=False)


def loaded(values, operand=0):
    return values.emit(Value(op="load", operand=operand, strides=(1,)))


def scaled(values, number, factor):
    return values.make("mul", number, values.const(factor, "float32"))


def computed(values, number, inputs):
    """The value in float64, where each constant and each product of two constants must be a float32 of its own."""
    value = values.values[number]
    if value.op == "load":
        return inputs[value.operand]
    if value.op == "const":
        assert value.constant == 0 or 2.0**-126 <= abs(value.constant) <= 2.0**127
        return value.constant
    assert value.op == "mul"
    result = math.prod(computed(values, arg, inputs) for arg in value.args)
    assert result == 0 or 1e-38 < abs(result) < 3.4e38, "no float32"
    return result


@pytest.mark.parametrize("factors", [(1e38, 4.0), (4.0, 1e38), (1e-30, 2.0**-40), (2.0**100, 2.0**100), (2.0**-100, 2.0**-100)])
def test_constants_whose_product_is_no_float32_stay_apart(values, factors):
    first = scaled(values, loaded(values), factors[0])
    second = scaled(values, first, factors[1])
    assert first in values.values[second].args


def test_constants_whose_product_is_a_float32_become_one(values):
    x = loaded(values)
    number = scaled(values, scaled(values, x, 0.7978845608028654), 2.0)
    assert computed(values, number, [3.0]) == 3.0 * (2.0 * 0.7978845608028654)
    assert x in values.values[number].args


@pytest.mark.parametrize(("power", "x"), [(2.0**-20, 1e20), (2.0**40, 1e-25)])
def test_a_square_is_scaled_before_it_is_taken(values, power, x):
    one = scaled(values, loaded(values), power)
    assert computed(values, values.make("mul", one, one), [x]) == (x * power) ** 2


@pytest.mark.parametrize(
    ("left", "right", "x", "y"),
    [(0.5, 2.0, 3e38, 0.25), (2.0**-30, 2.0**3, 1e30, 1e15), (2.0**3, 2.0**-30, 1e15, 1e30), (-0.5, 2.0, 1e38, 3.0),
     (2.0**60, 2.0**-4, 1e-30, 1e-10), (-(2.0**-20), -(2.0**2), 1e22, 1e20)],
)  # fmt: skip
def test_powers_of_both_signs_meet_on_one_side(values, left, right, x, y):
    ends = loaded(values, 0), loaded(values, 1)
    number = values.make("mul", scaled(values, ends[0], left), scaled(values, ends[1], right))
    assert computed(values, number, [x, y]) == pytest.approx(left * right * x * y, rel=1e-15)
    live, waiting = set(), [number]
    while waiting:
        live.add(one := waiting.pop())
        waiting += values.values[one].args
    assert sum(values.values[one].op == "mul" for one in live) == (1 if abs(left * right) == 1 and left * right > 0 else 2)
