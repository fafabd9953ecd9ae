"""Ops that draw random numbers from a seed of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion_advisor.library.program import Value, dropout_constants
from fusion_advisor.library.rule import CannotLower, Index, Rule, argument_of
from fusion_advisor.records import OpNode, Ref

if TYPE_CHECKING:
    from fusion_advisor.library.lower import Lowering


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
    strides, offset = _number(lowering, op, where)
    factor = lowering.emit(Value(op="dropout", args=(seed,), constant=float(p), strides=strides, offset=offset, dtype=dtype))
    return lowering.make("mul", value, factor)


def _number(lowering: Lowering, op: OpNode, where: Index) -> tuple[tuple[int, ...], int]:
    """The row-major number of element ``where``: one stride per loop variable, and an offset."""
    strides, offset, step = [0] * len(lowering.domain), 0, 1
    for size, (variable, shift) in reversed(list(zip(op.outputs[0].shape, where, strict=True))):
        if size != 1:
            offset += shift * step
            if variable is not None:
                strides[variable] += step
        step *= size
    return tuple(strides), offset


RANDOM: dict[str, Rule] = {"seeded_dropout": _seeded_dropout}
