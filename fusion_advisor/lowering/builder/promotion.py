"""The dtype in which torch compares tensors of several dtypes: those with dims decide, then those without, then Python's numbers.

What has a lower rank counts only where it is of a higher kind: a float64 without dims is rounded to the float32 elements that it
is compared with, and 300 becomes 44 for int8 ones.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from fusion_advisor.ir.dtypes import FLOATS, INTEGERS
from fusion_advisor.ir.program import HALF
from fusion_advisor.records import OpNode, Ref

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering

_OF_NUMBER = {bool: "bool", int: "int64", float: "float32"}


def common_dtype(lowering: Lowering, op: OpNode) -> str:
    """Return the dtype to which torch converts both sides of a comparison.

    Args:
        lowering: the chain.
        op: has two arguments, tensors or numbers.
    """
    metas = [lowering.meta(arg.index) for arg in op.args if isinstance(arg, Ref)]
    ranks = [
        [meta.dtype for meta in metas if meta.shape],
        [meta.dtype for meta in metas if not meta.shape],
        [_OF_NUMBER[type(arg)] for arg in op.args if type(arg) in _OF_NUMBER],
    ]
    found = [functools.reduce(_promoted, dtypes) for dtypes in ranks if dtypes]
    return functools.reduce(lambda higher, lower: lower if _kind(lower) > _kind(higher) else higher, found)


def _kind(dtype: str) -> int:
    return 2 if dtype in FLOATS else 1 if dtype in INTEGERS else 0


def _promoted(one: str, other: str) -> str:
    """The dtype of two that are of one rank."""
    if _kind(one) != _kind(other):
        return max(one, other, key=_kind)
    if {one, other} == HALF:
        return "float32"
    if {one, other} == {"uint8", "int8"}:
        return "int16"
    widest_first = (*FLOATS, *INTEGERS, "bool")
    return min(one, other, key=widest_first.index)
