"""Integers of narrow dtypes in kernels, which compute all integers in 64 bits."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fusion_advisor.ir.dtypes import BITS, INTEGERS, CannotLower
from fusion_advisor.lowering.builder.values import Values
from fusion_advisor.records import OpNode
from fusion_advisor.records.op_facts import overload_free

_STAYS_IN_RANGE = frozenset(
    ["where", "masked_fill", "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "relu", "sign", "remainder", "cat",
     "amax", "amin", "max", "min", "floor", "ceil", "trunc", "round"]
)  # fmt: skip
"""Ops whose integer results are never wider than their arguments."""


def wrapped(values: Values, number: int, dtype: str, name: str) -> int:
    """Wrap a result that may not fit a narrow dtype around, as torch's does; return the number of the value.

    Args:
        values: takes the values that wrap it.
        number: of the result.
        dtype: of the op's output.
        name: of the op.
    """
    return number if dtype not in BITS or name in _STAYS_IN_RANGE else _cut(values, number, dtype)


def argument_in_range(values: Values, number: int, source: str, op: OpNode) -> int:
    """Return an op's argument as an integer of its result's dtype, where the op computes with what exceeds that otherwise.

    A tensor without dims may have a wider dtype than the result; torch cuts its number first. Sums and products may be cut after.

    Args:
        values: takes the values that cut it.
        number: of the argument.
        source: its dtype.
        op: the op.
    """
    name = overload_free(op.target)
    is_cut_first = name in _STAYS_IN_RANGE or name == "pow"
    return in_range(values, number, source, op.outputs[0].dtype) if is_cut_first else number


def in_range(values: Values, number: int, source: str, dtype: str) -> int:
    """Return an integer of one dtype as an integer of another, which may not hold it.

    Args:
        values: takes the values that cut it.
        number: of the integer.
        source: its dtype.
        dtype: the wanted one.
    """
    if dtype not in BITS or source not in INTEGERS:
        return number
    low = _lowest(dtype)
    if source in BITS and low <= _lowest(source) and _lowest(source) + 2 ** BITS[source] <= low + 2 ** BITS[dtype]:
        return number
    return _cut(values, number, dtype)


def _cut(values: Values, number: int, dtype: str) -> int:
    low = _lowest(dtype)
    shifted = values.make("sub", number, values.const(low, "int64"))
    remainder = values.make("remainder", shifted, values.const(2 ** BITS[dtype], "int64"))
    return values.make("add", remainder, values.const(low, "int64"))


def refuse_too_wide(number: float, op: OpNode, argument_dtypes: Iterable[str]) -> None:
    """Refuse a number that an integer tensor cannot hold: torch wraps it around, in some ops and not in others.

    Args:
        number: an argument of the op.
        op: the op.
        argument_dtypes: dtypes of its tensor arguments.

    Raises:
        CannotLower: the number is out of range.
    """
    dtypes = set(argument_dtypes) - {"bool"}
    if not dtypes or any(dtype not in BITS for dtype in dtypes) or not math.isfinite(number):
        return
    for dtype in dtypes:
        low = _lowest(dtype)
        if not low <= number < low + 2 ** BITS[dtype]:
            raise CannotLower("FA601", f"{op.target} of {dtype} and {number!r}, which {dtype} cannot hold, has no lowering")


def _lowest(dtype: str) -> int:
    return 0 if dtype == "uint8" else -(2 ** (BITS[dtype] - 1))
