"""Ops that draw random numbers from a seed of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion_advisor.ir.affine_index import Index, Place
from fusion_advisor.ir.dtypes import CannotLower, argument_of
from fusion_advisor.ir.program import Value, dropout_constants
from fusion_advisor.lowering.builder.builder import Rule
from fusion_advisor.records import OpNode, Ref

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering


def _seeded_dropout(lowering: Lowering, op: OpNode, where: Index) -> int:
    value = lowering.argument(op, 0, where)
    dtype = lowering.values[value].dtype
    p = argument_of(op, 2, "p")
    if isinstance(p, bool) or not isinstance(p, int | float):
        raise CannotLower("FA601", f"{op.target} has a probability {p!r} that is no number")
    threshold, scale = dropout_constants(p)
    if threshold in (0, 2**32):
        return lowering.make("mul", value, lowering.const(scale if threshold == 0 else 0.0, dtype))
    given = argument_of(op, 1, "seed")
    assert isinstance(given, Ref)
    seed = lowering.the_number(given.index, "int64")
    number = _number(op, where)
    steps = dict(number.terms)
    strides = tuple(steps.get(variable, 0) for variable in range(len(lowering.nest.extents)))
    factor = lowering.emit(
        Value(op="dropout", args=(seed,), constant=float(p), strides=strides, offset=number.shift, dtype=dtype)
    )
    return lowering.make("mul", value, factor)


def _number(op: OpNode, where: Index) -> Place:
    """The row-major number of element ``where``."""
    number, step = Place(), 1
    for size, place in reversed(list(zip(op.outputs[0].shape, where, strict=True))):
        if size != 1:
            number = number.plus(place.scaled(step))
        step *= size
    if number.gathered:
        raise CannotLower("FA603", f"{op.target} is read at places that a tensor holds")
    return number


RANDOM: dict[str, Rule] = {"seeded_dropout": _seeded_dropout}
