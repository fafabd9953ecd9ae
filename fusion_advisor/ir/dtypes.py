"""What all rules share: the dtypes that kernels know, and how a rule says no."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fusion_advisor.records import Arg, OpNode

if TYPE_CHECKING:
    from fusion_advisor.ir.affine_index import Index
    from fusion_advisor.lowering.lower import Lowering

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool")

Rule = Callable[["Lowering", OpNode, "Index"], int]
"""Returns the number of the SSA value that is the wanted element of an op."""


class CannotLower(Exception):
    """Why ops cannot become one kernel; ``code`` is explained by ``fusion-advisor explain``."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def compute_dtype(dtype: str) -> str:
    """Return the dtype that a tensor dtype is computed in."""
    if dtype in FLOATS:
        return "float64" if dtype == "float64" else "float32"
    return "bool" if dtype == "bool" else "int64"


def argument_of(op: OpNode, position: int, name: str, default: Arg = None) -> Arg:
    """Return an op's argument, wherever the call has put it."""
    return op.args[position] if position < len(op.args) else dict(op.kwargs).get(name, default)
