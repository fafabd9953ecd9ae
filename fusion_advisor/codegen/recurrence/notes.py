"""The head comment of a recurrence's kernel: what it moves, against what the steps one by one move."""

from __future__ import annotations

from fusion_advisor.codegen.common.interface import Header
from fusion_advisor.ir.program import ITEM_BYTES, REDUCTIONS
from fusion_advisor.ir.recurrence import Recurrence

_COUNTED = frozenset({"load", "const", "index", "size", "extent", "cast"})


def notes_of(recurrence: Recurrence, header: Header) -> list[str]:
    """Return the sentences of the head comment.

    Args:
        recurrence: what the kernel walks.
        header: title, summary, origin and source.
    """
    program = recurrence.program
    sizes = " x ".join(map(str, program.dims))
    state = program.operands[recurrence.state]
    state_bytes = state.element_count * ITEM_BYTES[state.dtype]
    computed = sum(value.op not in _COUNTED for value in program.values)
    moved = recurrence.moved_bytes
    elements = 1
    for size in program.dims:
        elements *= size
    width = "columns of the state, which are summed" if any(v.op in REDUCTIONS for v in program.values) else "columns"
    lines = [
        f"{header.title}: {header.summary}",
        f"Moves {moved:,} bytes at {sizes} (steps, rows, {width}): every input is read once and every row written once.",
        f"The state, {state_bytes:,} bytes, is read before the first step and written after the last one. One by one the steps "
        f"would read and write it {recurrence.steps:,} times.",
        f"Computes {computed} ops an element: at most {computed * elements / max(moved, 1):.1f} operations for a byte.",
        f"Origin: {header.origin}",
    ]
    return [*lines, *([f"Source: {header.source}"] if header.source else [])]
