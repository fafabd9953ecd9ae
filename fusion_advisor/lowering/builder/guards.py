"""Guards of loads: which loops decide where an element is wanted, and what of that holds for a whole row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.values import Values


def decided_by(values: Values, guard: int) -> frozenset[int] | None:
    """The loop variables that decide on a guard; None where what is read from memory decides too."""
    deciding, waiting = set[int](), [guard]
    while waiting:
        value = values.values[waiting.pop()]
        if value.op in ("load", "inside"):
            return None
        deciding |= {value.dim} if value.op == "index" else set()
        waiting += value.args
    return frozenset(deciding)


def guard_of_rows(values: Values, guard: int | None, reduced: frozenset[int]) -> int | None:
    """The part of a guard that says which whole rows are wanted.

    Every column of a wanted row counts, whichever of them the reader asks for. A row that is not wanted may lie outside its
    tensor: with ``cat([norm(text), norm(image)], 1)`` the first rows of the result lie ahead of the image's.

    Args:
        values: of the chain.
        guard: of the reader.
        reduced: loop variables of the columns.

    Returns:
        None where every row is wanted.
    """
    kept = None
    for part in () if guard is None else _parts(values, guard):
        deciding = decided_by(values, part)
        if deciding is not None and deciding.isdisjoint(reduced):
            kept = part if kept is None else values.make("and", kept, part, dtype="bool")
    return kept


def _parts(values: Values, guard: int) -> Iterator[int]:
    value = values.values[guard]
    if value.op != "and":
        yield guard
        return
    for part in value.args:
        yield from _parts(values, part)
