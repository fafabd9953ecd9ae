"""Which values of a Program a printed reference gives a name, and which it writes inside others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fusion_advisor.ir.program import REDUCTIONS, Program

LONGEST = 72
"""Characters of an expression that is written inside another one."""
_WORDS = {
    "add": "total", "sub": "difference", "mul": "product", "div": "quotient", "neg": "negated", "abs": "magnitude",
    "maximum": "larger", "minimum": "smaller", "rsqrt": "inverse_root", "sqrt": "root", "where": "selected", "pow": "power",
    "cast": "converted", "reduce_sum": "row_sum", "reduce_max": "row_max", "reduce_min": "row_min", "inside": "in_bounds",
    "dropout": "factor", "round_float16": "rounded", "round_bfloat16": "rounded", "quotient": "group", "index": "position",
    "exp": "exponential", "exp2": "exponential", "log": "logarithm", "sigmoid": "gate", "tanh": "tanh_value", "erf": "erf_value",
    "and": "both", "or": "either", "xor": "differs", "not": "inverse", "isnan": "is_nan", "eq": "is_equal", "ne": "is_other",
    "lt": "is_below", "le": "is_at_most", "gt": "is_above", "ge": "is_at_least",
}  # fmt: skip


def is_named_always(program: Program, number: int) -> bool:
    """Whether a value gets a name however short it is: it is used twice, read from memory, reduced, or checked."""
    value = program.values[number]
    if value.op in ("const", "size", "extent", "index"):
        return False
    uses = Counter(arg for v in program.values for arg in (*v.args, *(() if v.guard is None else (v.guard,))))
    uses.update(need for store in program.stores for need in store.needs)
    return uses[number] > 1 or value.op in REDUCTIONS or value.op in ("load", "inside", "dropout")


class ValueNames:
    """Hands out a name for each value of a reference.

    Args:
        taken: names that mean something else there.
    """

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)

    def take(self, program: Program, number: int) -> str:
        """A name that no other value has."""
        value = program.values[number]
        word = (
            f"{program.operands[value.operand].name}_value" if value.op == "load" else _WORDS.get(value.op, f"{value.op}_value")
        )
        return self.fresh(value.constant_name or word)

    def fresh(self, wanted: str) -> str:
        """``wanted``, or a variant of it where that is taken."""
        name, number = wanted, 2
        while name in self._taken:
            name, number = f"{wanted}_{number}", number + 1
        self._taken.add(name)
        return name
