"""Names in a C++ kernel: no clash with the language or with each other, and as telling as the op allows."""

from __future__ import annotations

from fusion_advisor.ir.program import Program, Value

_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl const constexpr continue
decltype default delete do double dynamic_cast else enum explicit export extern false float for friend goto if inline
int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register
reinterpret_cast return short signed sizeof static static_assert static_cast struct switch template this thread_local
throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq main std
linux unix INFINITY NAN index y0 y1 yn j0 j1 jn gamma signgam uint8_t uint16_t uint32_t uint64_t int8_t int16_t
int32_t int64_t
"""
_RESERVED = frozenset(_KEYWORDS.split())

_WORDS = {
    "add": "sum", "sub": "difference", "mul": "product", "div": "quotient", "neg": "negated", "abs": "magnitude",
    "maximum": "larger", "minimum": "smaller", "exp": "exponential", "exp2": "exponential", "expm1": "exponential",
    "log": "logarithm", "log1p": "logarithm", "sqrt": "root", "rsqrt": "inverse_root", "reciprocal": "inverse", "sigmoid": "gate",
    "tanh": "tanh_value", "erf": "erf_value", "eq": "is_equal", "ne": "is_other", "lt": "is_below", "le": "is_at_most",
    "gt": "is_above", "ge": "is_at_least", "sin": "sine", "cos": "cosine",
    "pow": "power", "floor": "whole", "ceil": "whole", "trunc": "whole",
    "round": "whole", "remainder": "rest", "sign": "sign", "where": "selected", "cast": "converted", "isnan": "is_nan",
    "and": "both", "or": "either", "xor": "differs", "not": "otherwise", "reduce_sum": "row_sum", "reduce_max": "row_max",
    "reduce_min": "row_min", "dropout": "factor", "inside": "in_bounds", "round_float16": "rounded", "round_bfloat16": "rounded",
}  # fmt: skip


class Names:
    """Hands out identifiers; those of one inner loop are free again in the next."""

    def __init__(self) -> None:
        self._taken: set[str] = set(_RESERVED)
        self._kept: set[str] = set()
        self._rows: dict[str, str] = {}

    def reserve(self, name: str) -> None:
        """Keep a name from being handed out."""
        self._taken.add(name)

    def take(self, wanted: str, *, is_kept: bool = False) -> str:
        """Return ``wanted`` or, where that is taken, a variant of it."""
        stem, number, name = wanted, 2, wanted
        if name in _RESERVED:
            stem = name = f"{wanted}_"
        while name in self._taken:
            name = f"{stem}_{number}"
            number += 1
        self._taken.add(name)
        if is_kept:
            self._kept.add(name)
        return name

    def view(self, operand: str) -> str:
        """One of several ways in which a kernel addresses the same tensor."""
        number = 0
        while f"{operand}_{number}" in self._taken:
            number += 1
        return self.take(f"{operand}_{number}")

    def row(self, view: str) -> str:
        """The pointer to a view's row."""
        if view not in self._rows:
            self._rows[view] = self.take(f"{view}_row", is_kept=True)
        return self._rows[view]

    def mark(self) -> None:
        """Keep everything handed out so far for the whole kernel."""
        self._kept |= self._taken

    def reset(self) -> None:
        """Start an inner loop: names of the one before are free."""
        self._taken = set(self._kept)


def describe(program: Program, number: int) -> str:
    """A name for a value, from what it is."""
    value = program.values[number]
    args = [program.values[a] for a in value.args]
    if value.op == "load":
        return f"{program.operands[value.operand].name}_value"
    if value.op in ("div", "mul") and args[0].op == "reduce_sum":
        return _mean_of(program, args[0])
    if value.op == "sub" and _is_mean(program, value.args[1]):
        return "centred"
    if value.op == "reduce_sum" and _is_square(program, args[0]):
        return "square_sum"
    return _WORDS.get(value.op, value.op)


def _is_mean(program: Program, number: int) -> bool:
    value = program.values[number]
    return value.op == "div" and program.values[value.args[0]].op == "reduce_sum"


def _is_square(program: Program, value: Value) -> bool:
    if value.op == "pow":
        return program.values[value.args[1]].constant == 2
    return value.op == "mul" and value.args[0] == value.args[1]


def _mean_of(program: Program, total: Value) -> str:
    squared = program.values[total.args[0]]
    if not _is_square(program, squared):
        return "mean"
    base = program.values[squared.args[0]]
    return "variance" if base.op == "sub" and _is_mean(program, base.args[1]) else "mean_square"
