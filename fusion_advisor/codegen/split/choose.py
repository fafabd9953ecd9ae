"""Which Programs become several launches: the question that a backend asks of every Program."""

from __future__ import annotations

from dataclasses import replace

from fusion_advisor.codegen.split.channel_groups import split_groups
from fusion_advisor.codegen.split.column_sums import split_columns
from fusion_advisor.codegen.split.parts import Part, Parts, scratch_name
from fusion_advisor.ir.program import Program


def split_program(program: Program) -> Parts | None:
    """Return the launches that a Program becomes; None where it is one.

    A launch that is itself worth cutting is cut in its turn: the sums of 32,768 rows are 2,048 partial sums, then 128, then 8.

    Args:
        program: any.
    """
    found = split_groups(program) or split_columns(program)
    return None if found is None else _flat(found)


def _flat(outer: Parts) -> Parts:
    """Put the launches that a part becomes in its place; their scratch tensors follow those that are there."""
    parts: list[Part] = []
    scratch = list(outer.scratch)
    for part in outer.parts:
        inner = split_program(part.program)
        if inner is None:
            parts.append(part)
            continue
        parts += [_inlined(one, part, len(scratch)) for one in inner.parts]
        scratch += inner.scratch
    return Parts(parts=tuple(parts), scratch=tuple(scratch))


def _inlined(inner: Part, outer: Part, before: int) -> Part:
    """Return a part of a part with operands of the whole Program.

    Args:
        inner: one of the launches that ``outer`` becomes.
        outer: reads and writes what its operands say.
        before: scratch tensors that are there already.
    """
    numbers = tuple(outer.operands[number] if number >= 0 else number - before for number in inner.operands)
    operands = tuple(
        replace(operand, name=scratch_name(number)) if number < 0 else operand
        for operand, number in zip(inner.program.operands, numbers, strict=True)
    )
    return replace(inner, program=replace(inner.program, operands=operands), operands=numbers, does=inner.does or outer.does)
