"""Several loop nests in one kernel: each is a function, and the entry point tells blocks of one from blocks of another.

The first blocks belong to the first nest, the next ones to the second, and so on, so that every block takes one branch and the
nests are under way at the same time. Nests with one layout key share one function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion_advisor.codegen.common.arguments import Schedule, pointer_names, schedule
from fusion_advisor.codegen.common.interface import OpenArguments
from fusion_advisor.ir.program import Program, layout_key, nests

MULTIPLE = 16
"""Bytes of the widest access, and what Triton looks for in integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A loop nest in a kernel of several."""

    function: str
    plan: Schedule
    pointers: tuple[str, ...]
    """What it is given for its own operands, in their order."""
    arguments: tuple[tuple[str, int], ...]
    """The same for its own integers, each with its value."""


def calls_of(program: Program, *, flatten_rows: bool) -> tuple[Call, ...]:
    """Return the loop nests of a Program; one alone keeps the names that its schedule gives.

    Args:
        program: what to compute.
        flatten_rows: see :func:`~fusion_advisor.codegen.common.arguments.schedule`.
    """
    parts = nests(program)
    if len(parts) == 1:
        plan = schedule(program, flatten_rows=flatten_rows)
        return (Call(function="", plan=plan, pointers=plan.pointers, arguments=plan.arguments),)
    pointers, found = pointer_names(program), []
    keys: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        key = layout_key(part.program)
        keys.setdefault(key, f"part{len(keys) + 1}")
        plan = schedule(part.program, flatten_rows=flatten_rows)
        arguments = tuple((f"{name}_of_{number}", value) for name, value in plan.arguments)
        own = tuple(pointers[operand] for operand in part.operands)
        found.append(Call(function=keys[key], plan=plan, pointers=own, arguments=arguments))
    return tuple(found)


def functions_of(calls: Sequence[Call]) -> tuple[Call, ...]:
    """The first call of each function: what has to be written."""
    found: dict[str, Call] = {}
    for call in calls:
        found.setdefault(call.function, call)
    return tuple(found.values())


def largest(calls: Sequence[Call]) -> Schedule:
    """The nest of the most elements, which decides the launch."""
    return max((call.plan for call in calls), key=lambda plan: plan.row_count * plan.program.dims[-1])


def starts(counts: Sequence[int]) -> list[tuple[str, int]]:
    """Where the blocks of each nest after the first begin: argument and value.

    Args:
        counts: blocks of each nest.
    """
    return [(f"start_of_{number + 2}", sum(counts[: number + 1])) for number in range(len(counts) - 1)]


def open_arguments(program: Program, elsewhere: Sequence[Program], *, flatten_rows: bool) -> OpenArguments:
    """Return the integers that differ between a Program and itself at other sizes; none where there are no others.

    Args:
        program: what is rendered.
        elsewhere: the same at other sizes.
        flatten_rows: see :func:`calls_of`.

    Raises:
        ValueError: one of these is another Program.
    """
    if not elsewhere:
        return OpenArguments()
    key = layout_key(program)
    if any(layout_key(other) != key for other in elsewhere):
        raise ValueError("programs of several layouts cannot share a kernel")
    calls = [calls_of(one, flatten_rows=flatten_rows) for one in (program, *elsewhere)]
    given = [[item for call in one for item in call.arguments] for one in calls]
    values = {name: [one[place][1] for one in given] for place, (name, _) in enumerate(given[0])}
    names = [name for name, found in values.items() if len(set(found)) > 1]
    multiples = [name for name in names if all(value % MULTIPLE == 0 for value in values[name])]
    if len({tuple(call.plan.program.dims for call in one) for one in calls}) > 1:
        names[:0] = [name for name, _ in starts([0] * len(calls[0]))]
    return OpenArguments(names=tuple(names), multiples=tuple(multiples))
