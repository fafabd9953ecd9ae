"""Integers that are drawn for a kernel's check stay where its positions are inside."""

from __future__ import annotations

import pytest

from fusion_advisor.codegen.common.site import tensors_of
from fusion_advisor.ir.program import Operand, Program, Store, Value

EXTENT = 40


def gather(*position):
    """A Program that reads a table of 40 elements at a position that some values compute of ``ids`` and ``mask``."""
    loads = [Value(op="load", dtype="int64", operand=number, strides=(1,)) for number in (0, 1)]
    values = [*loads, Value(op="extent", dtype="int64", constant=EXTENT), *position]
    place = len(values) - 1
    values.append(Value(op="inside", dtype="bool", args=(place, 2)))
    values.append(Value(op="load", dtype="float32", operand=2, strides=(0,), args=(place,), steps=(1,), guard=len(values) - 1))
    operands = [
        Operand(name="ids", dtype="int64", element_count=4), Operand(name="mask", dtype="int64", element_count=4),
        Operand(name="table", dtype="float32", element_count=EXTENT),
        Operand(name="out", dtype="float32", element_count=4, is_output=True),
    ]  # fmt: skip
    store = Store(operand=3, value=len(values) - 1, strides=(1,))
    return Program(dims=(4,), is_reduced=False, operands=tuple(operands), values=tuple(values), stores=(store,))


ONE = Value(op="const", dtype="int64", constant=1)


@pytest.mark.parametrize(
    ("values", "largest"),
    [
        ([Value(op="add", dtype="int64", args=(0, 1))], lambda ids, mask: ids + mask),
        (
            [ONE, Value(op="mul", dtype="int64", args=(0, 1)), Value(op="add", dtype="int64", args=(4, 3))],
            lambda ids, mask: ids * mask + 1,
        ),
    ],
)
def test_computed_positions_stay_inside(values, largest):
    ids, mask, *_ = tensors_of(gather(*values))
    assert min(ids.below, mask.below) > 1
    assert largest(ids.below - 1, mask.below - 1) < EXTENT


def test_a_wrapped_position_is_drawn_below_the_extent():
    zero = Value(op="const", dtype="int64", constant=0)
    wrapped = [
        zero, Value(op="lt", dtype="bool", args=(0, 3)), Value(op="add", dtype="int64", args=(0, 2)),
        Value(op="where", dtype="int64", args=(4, 5, 0)),
    ]  # fmt: skip
    ids, *_ = tensors_of(gather(*wrapped))
    assert ids.below == EXTENT
