"""Integers that overflow in CUDA C++: torch's wrap around, and C++ leaves a signed overflow undefined.

Sums, differences, products and negatives that may not fit 64 bits are computed without a sign, by helpers; what is known to fit
keeps its operator.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion_advisor.codegen.common.printer import Text
from fusion_advisor.ir.integer_range import WORD, bits_of
from fusion_advisor.ir.program import Program

OPS = ("add", "sub", "mul", "neg", "abs")
HELPERS = tuple(f"wrapping_{op}" for op in OPS)
UNSIGNED = "unsigned long long"


def may_wrap(program: Program) -> frozenset[int]:
    """Return the numbers of the integer values that may not fit 64 bits."""
    bits = bits_of(program.values, [operand.dtype for operand in program.operands])
    return frozenset(n for n, value in enumerate(program.values) if value.dtype == "int64" and bits[n] >= WORD)


def call(op: str, args: Sequence[Text], helpers: set[str]) -> Text:
    """Return a call of an op's helper, and add to ``helpers`` what it needs."""
    helpers |= {f"wrapping_{op}", *(["wrapping_neg"] if op == "abs" else [])}
    return Text(f"wrapping_{op}({', '.join(arg.code for arg in args)})")
