"""Names for the values of a Program: in kernels from what the values are, in printed references from their ops alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from fusion_advisor.ir.causal_mask import order_of
from fusion_advisor.ir.program import COMPARES, LOGIC, REDUCTIONS, Program, Value, reader_of

if TYPE_CHECKING:
    from fusion_advisor.codegen.common.arguments import Schedule

_C = """auto bool break case char class const continue default delete do double else enum extern float for goto if inline int long
    namespace new operator private public register return short signed sizeof static struct switch template this typedef union
    unsigned using void volatile while"""
_OF_KERNELS = """row col rows cols index size outer tile tl triton lane lanes first step mask row_mask col_mask col_tiles
    row_tiles start item item_mask item_col_mask shared_col"""
C_KEYWORDS = frozenset(_C.split())
KERNEL_WORDS = frozenset(_OF_KERNELS.split())
"""What kernels' own lines name."""
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


class Identifiers:
    """Hands out identifiers, each once.

    Args:
        taken: those that mean something else.
    """

    def __init__(self, taken: set[str]) -> None:
        self.taken = taken

    def take(self, name: str, *, exact: bool = False) -> str:
        """Return a name that nothing else has; with ``exact`` this one, whatever has it."""
        candidate, count = name, 1
        while candidate in self.taken and not exact:
            count += 1
            candidate = f"{name}_{count}"
        self.taken.add(candidate)
        return candidate


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


# Nouns of a kernel's values.

_LONGEST_NOUN = 36
_NOUNS = {
    "mul": "product",
    "add": "total",
    "sub": "difference",
    "div": "quotient",
    "where": "selected",
    "neg": "negated",
    "quotient": "part",
    "round_float16": "rounded",
    "round_bfloat16": "rounded",
}
_Rule = Callable[["Schedule", int, Value, Sequence[str]], "str | None"]
"""Names a value from its schedule, its number, itself and its arguments' nouns; None where the rule does not apply."""


def nouns_of(plan: Schedule) -> list[str]:
    """Return a noun for each value of a kernel; several values may have the same."""
    program = plan.program
    nouns: list[str] = []
    in_bounds = {value.guard for value in program.values if value.op == "load" and value.args}
    fits = {store.guard for store in program.stores}
    stored = _stored_nouns(plan)
    for number, value in enumerate(program.values):
        if number in stored:
            nouns.append(stored[number])
            continue
        if number in in_bounds:
            noun = f"{program.operands[reader_of(program, number)].name}_in_bounds"
        elif number in fits:
            noun = f"fits_{program.operands[reader_of(program, number)].name}"
        else:
            noun = _noun(plan, number, value, [nouns[arg] for arg in value.args])
        nouns.append(noun if len(noun) <= _LONGEST_NOUN else f"{value.op}_value")
    return nouns


def _stored_nouns(plan: Schedule) -> dict[int, str]:
    """Nouns of what is computed and written once: the name of where it goes, and which part of that it is."""
    program, found = plan.program, dict[int, str]()
    for position, store in enumerate(program.stores):
        is_only_store = sum(s.value == store.value for s in program.stores) == 1
        if not is_only_store or program.values[store.value].op == "load":
            continue
        even, odd = plan.store_pair(position)
        is_one_of_two = sum(s.operand == store.operand for s in program.stores) == 2
        part = "_shifted" if store.offset and is_one_of_two else ""
        if even != odd:
            part = "_odd" if position == odd else "_even"
        found[store.value] = program.operands[store.operand].name + part
    return found


def _noun(plan: Schedule, number: int, value: Value, args: Sequence[str]) -> str:
    if value.op in _FIRST and (noun := _FIRST[value.op](plan, number, value, args)):
        return noun
    if value.constant_name:
        return value.constant_name
    if value.op in REDUCTIONS:
        return f"{args[0]}_{value.op.removeprefix('reduce_')}"
    for rule in _BY_OP.get(value.op, ()):
        if noun := rule(plan, number, value, args):
            return noun
    if order_of(plan.program, number) is not None:
        return "is_kept"
    if value.op in _NOUNS:
        return _NOUNS[value.op]
    if value.op in COMPARES or value.op in LOGIC or value.op in ("not", "isnan"):
        return f"is_{value.op}"
    return f"{value.op}_{args[0]}" if args and value.op not in args[0] else f"{value.op}_value"


def _load(plan: Schedule, number: int, value: Value, _args: Sequence[str]) -> str:
    program, name = plan.program, plan.program.operands[value.operand].name
    even, odd = plan.load_pair(number)
    if even != odd:
        return f"{name}_{'odd' if number == odd else 'even'}"
    is_one_of_many = sum(v.op == "load" and v.operand == value.operand for v in program.values) > 1
    return name + ("_shifted" if value.offset and is_one_of_many else "")


def _mean(plan: Schedule, _number: int, value: Value, args: Sequence[str]) -> str | None:
    if not args[0].endswith("_sum") or plan.program.values[value.args[1]].op not in ("size", "const"):
        return None
    noun = args[0].removesuffix("_sum") + "_mean"
    return noun.replace("_centered_squared_mean", "_variance") if noun.endswith("_centered_squared_mean") else noun


def _sum_with_constant(plan: Schedule, _number: int, value: Value, args: Sequence[str]) -> str | None:
    added = plan.program.values[value.args[1]]
    if added.op == "const" and added.constant_name:
        return f"{args[0]}_{added.constant_name}"
    if added.op == "const" and args[0].endswith(("_variance", "_squared_mean")):
        return f"{args[0]}_eps"
    return f"{args[0]}_plus_1" if added.op == "const" and added.constant == 1 else None


def _root(_plan: Schedule, _number: int, value: Value, args: Sequence[str]) -> str | None:
    if "_variance" not in args[0] and "_squared_mean" not in args[0]:
        return None
    return ("inverse_" if value.op == "rsqrt" else "") + ("deviation" if "_variance" in args[0] else "rms")


def _square(_plan: Schedule, _number: int, value: Value, args: Sequence[str]) -> str | None:
    return f"{args[0]}_squared" if value.args[0] == value.args[1] else None


def _centered(_plan: Schedule, _number: int, _value: Value, args: Sequence[str]) -> str | None:
    if args[1] not in (f"{args[0]}_mean", f"{args[0]}_max"):
        return None
    return f"{args[0]}_centered" if args[1].endswith("_mean") else f"{args[0]}_shifted"


def _place(_plan: Schedule, _number: int, value: Value, _args: Sequence[str]) -> str | None:
    return {"add": "place", "sub": "gap"}[value.op] if value.dtype == "int64" else None


_FIRST: dict[str, _Rule] = {
    "load": _load,
    "dropout": lambda _plan, _number, _value, _args: "factor",
    "inside": lambda _plan, _number, _value, _args: "is_in_table",
}
"""These names come before that of a constant in the manifest."""
_BY_OP: dict[str, tuple[_Rule, ...]] = {
    "div": (_mean,),
    "add": (_sum_with_constant, _place),
    "sub": (_centered, _place),
    "mul": (_square,),
    "rsqrt": (_root,),
    "sqrt": (_root,),
    "reciprocal": (lambda _plan, _number, _value, args: "inverse_sum" if args[0].endswith("_sum") else None,),
    "cast": (lambda _plan, _number, _value, args: args[0],),
}
