"""Integers of narrow dtypes in kernels, which compute all integers in 64 bits."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fusion_advisor.ir.dtypes import BITS, CannotLower
from fusion_advisor.lowering.builder.values import Values
from fusion_advisor.records import OpNode

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
    if dtype not in BITS or name in _STAYS_IN_RANGE:
        return number
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
