"""The dtypes that kernels know, and the refusal of a chain that no kernel computes."""

from __future__ import annotations

from fusion_advisor.records import Arg, OpNode

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
BITS = {"int32": 32, "int16": 16, "int8": 8, "uint8": 8}
"""Of the integers that are computed in 64 bits and cut to fewer."""
DTYPES = (*FLOATS, *INTEGERS, "bool")


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
