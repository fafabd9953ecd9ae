"""Names of a Program's operands and constants: a kernel's manifest gives them, and Programs of changed graphs inherit them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusion_advisor.ir.program import Part, Program, Value, nests

_MOST_JOINED = 4
"""Names that are joined for an operand which holds several tensors: more would make a name that nobody reads."""


def names_in(program: Program) -> tuple[tuple[str, ...], tuple[tuple[int, str], ...]]:
    """Return the names of a Program's operands, and the names of its constants by value, counted through its loop nests."""
    values = [value for part in nests(program) for value in part.program.values]
    named = tuple((number, value.constant_name) for number, value in enumerate(values) if value.constant_name)
    return tuple(operand.name for operand in program.operands), named


def with_names(program: Program, names: Sequence[str], constants: Mapping[int, str] | None = None) -> Program:
    """Name the operands of a Program and of its loop nests.

    Args:
        program: its own names are replaced.
        names: of the operands, in order.
        constants: names of constants by value number, counted through the loop nests; None keeps those that are there.

    Raises:
        ValueError: there are more or fewer names than operands.
    """
    operands = tuple(replace(operand, name=name) for operand, name in zip(program.operands, names, strict=True))
    siblings, before = [], len(program.values)
    for part in program.siblings:
        own = tuple(replace(o, name=operands[at].name) for o, at in zip(part.program.operands, part.operands, strict=True))
        values = _constants_named(part.program.values, constants, before)
        siblings.append(replace(part, program=replace(part.program, operands=own, values=values)))
        before += len(part.program.values)
    return replace(
        program, operands=operands, values=_constants_named(program.values, constants, 0), siblings=tuple(siblings)
    )  # fmt: skip


def _constants_named(values: Sequence[Value], constants: Mapping[int, str] | None, before: int) -> tuple[Value, ...]:
    if constants is None:
        return tuple(values)
    return tuple(replace(value, constant_name=constants.get(before + number, "")) for number, value in enumerate(values))


def named_like(program: Program, model: Program) -> Program:
    """Give a Program the names of another that computes the same values from differently laid out tensors.

    Where the model reads two tensors and the Program slices of one tensor, the operand has both names: ``q_k`` for queries and
    keys that one GEMM computes.

    Returns:
        the Program as it is where the two do not compute the same values, op for op.
    """
    mine, theirs = nests(program), nests(model)
    if [_ops(part) for part in mine] != [_ops(part) for part in theirs]:
        return program
    found: dict[int, dict[str, None]] = {}
    for own, named in zip(mine, theirs, strict=True):
        for at, there in zip(_operands_used(own), _operands_used(named), strict=True):
            found.setdefault(at, {})[model.operands[there].name] = None
    names = ["_".join(list(found.get(at, (operand.name,)))[:_MOST_JOINED]) for at, operand in enumerate(program.operands)]
    return with_names(program, unique(names), dict(names_in(model)[1]))


def _ops(part: Part) -> tuple[list[str], int]:
    return [value.op for value in part.program.values], len(part.program.stores)


def _operands_used(part: Part) -> list[int]:
    """Positions, among the launch's operands, of the operand of each load and of each store."""
    loads = [value.operand for value in part.program.values if value.op == "load"]
    return [part.operands[own] for own in (*loads, *(store.operand for store in part.program.stores))]


def unique(names: Sequence[str]) -> list[str]:
    """Return names as they are, numbered where they would repeat: ``x, x`` become ``x, x2``."""
    found: dict[str, None] = {}
    for name in names:
        base = name.rstrip("0123456789")
        numbered = (f"{base}{number}" for number in itertools.count(2))
        found[next(free for free in itertools.chain((name,), numbered) if free not in found)] = None
    return list(found)
