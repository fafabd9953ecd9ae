"""Rows of the printer tables that Triton and CUDA C++ have in common, and what rows are made of.

A language's table says how each op of the kernel IR is printed: one row for each op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusion_advisor.codegen.common.printer import (
    ATOM,
    COMPARE,
    LOGIC,
    LOOSE,
    PRODUCT,
    SUM,
    UNARY,
    Row,
    Text,
    Unsupported,
    Writer,
)
from fusion_advisor.ir.program import COMPARES, REDUCTIONS, ROUNDINGS, Program, Value

_JUMPS = frozenset({"floor", "ceil", "trunc", "round", "remainder", "sign", *COMPARES})
_DIVISIONS = frozenset({"div", "reciprocal", "sqrt"})
_SHORT = frozenset({"sigmoid", "tanh", "expm1", "log1p", "erfc"})


def infix(sign: str, rank: int) -> Row:
    """Return the row of an operator. The right operand keeps its parentheses at equal rank."""
    return lambda _writer, _number, _value, args: Text(f"{args[0].at(rank)} {sign} {args[1].at(rank + 1)}", rank)


def call_of(function: str) -> Row:
    """Return the row of a function that the language has."""
    return lambda _writer, _number, _value, args: Text(f"{function}({', '.join(arg.code for arg in args)})")


def helper(function: str, *needed: str) -> Row:
    """Return the row of a function that the template defines.

    Args:
        function: its name.
        needed: helpers that it calls.
    """

    def row(writer: Writer, _number: int, _value: Value, args: Sequence[Text]) -> Text:
        writer.helpers |= {function, *needed}
        return Text(f"{function}({', '.join(arg.code for arg in args)})")

    return row


def _const(writer: Writer, _number: int, value: Value, _args: Sequence[Text]) -> Text:
    code = writer.literal(value)
    return Text(code, UNARY if code.startswith("-") else ATOM)


def _load(writer: Writer, number: int, value: Value, _args: Sequence[Text]) -> Text:
    return Text(writer.load(number, value, writer.plan.loads[number]))


def _reduction(writer: Writer, number: int, value: Value, _args: Sequence[Text]) -> Text:
    if value.dtype == "bool":
        raise Unsupported(f"{value.op} of bool")
    return Text(writer.reduction(number, value))


def product(writer: Writer, number: int, value: Value, args: Sequence[Text]) -> Text:
    """Print a product: rounded by itself where several users must see one rounding, else as the operator."""
    if writer.is_shared_product(number, value):
        return writer.rounded_product(value, args)
    return writer.scaled(value) or INFIX["mul"](writer, number, value, args)


def _sum(sign: str, inverse: str) -> Row:
    """Return the row of a sum or a difference; what is added with a minus sign is subtracted, which is the same number."""

    def row(_writer: Writer, _number: int, _value: Value, args: Sequence[Text]) -> Text:
        left, right = args
        is_lowest = right.code.startswith(str(-(2**63)))  # which has no positive
        if right.code.startswith("-") and right.rank == UNARY and not is_lowest:
            return Text(f"{left.at(SUM)} {inverse} {right.code[1:]}", SUM)
        return Text(f"{left.at(SUM)} {sign} {right.at(SUM + 1)}", SUM)

    return row


INFIX: Mapping[str, Row] = {
    "add": _sum("+", "-"),
    "sub": _sum("-", "+"),
    "mul": infix("*", PRODUCT),
    "div": infix("/", PRODUCT),
}


def comparison(sign: str) -> Row:
    """Return the row of a comparison, which Python and C bind differently."""
    return lambda _writer, _number, _value, args: Text(f"{args[0].at(SUM)} {sign} {args[1].at(SUM)}", LOOSE)


def _logic(sign: str) -> Row:
    return lambda _writer, _number, _value, args: Text(f"{args[0].at(ATOM)} {sign} {args[1].at(ATOM)}", LOOSE)


SHARED: Mapping[str, Row] = {
    **INFIX,
    "mul": product,
    "const": _const,
    "load": _load,
    "index": lambda writer, number, value, _args: writer.index(number, value),
    "extent": lambda writer, number, _value, _args: Text(writer.plan.extents[number]),
    "dropout": lambda writer, number, value, _args: writer.dropout(number, value),
    "inside": lambda writer, number, value, args: writer.inside(number, value, args),
    **dict.fromkeys(sorted(REDUCTIONS), _reduction),
    **{op: comparison(sign) for op, sign in COMPARE.items()},
    **{op: _logic(sign) for op, sign in LOGIC.items()},
    "neg": lambda _writer, _number, _value, args: Text(f"-{args[0].at(ATOM)}", UNARY),
    "isnan": lambda _writer, _number, _value, args: Text(f"{args[0].at(SUM)} != {args[0].at(SUM)}", LOOSE),
}
"""Rows that Triton and CUDA C++ have in common; each language's table adds its own."""


def jumps_after_division(program: Program) -> bool:
    """Return whether something that a division or a root is part of is rounded to a whole number, compared, or made an integer.

    Where nothing is, a division or a root whose results are rounded to 16 bits may be two units in the last place off.
    """
    return _jumps_after(program, _DIVISIONS, ends=frozenset())


def jumps_after_function(program: Program) -> bool:
    """Return the same of a function that is shorter where results are rounded to 16 bits: 0.49999997 for the sigmoid of 0, say.

    What is rounded to 16 bits before it is compared shows nothing of that.
    """
    return _jumps_after(program, _SHORT, ends=frozenset(ROUNDINGS.values()))


def _jumps_after(program: Program, ops: frozenset[str], *, ends: frozenset[str]) -> bool:
    after = set[int]()
    for number, value in enumerate(program.values):
        is_after = not after.isdisjoint(value.args) and value.op not in ends
        if is_after and (value.op in _JUMPS or value.dtype in ("int64", "bool")):
            return True
        if is_after or value.op in ops:
            after.add(number)
    return False
