"""The order in which the rows of a reduced Program are worked on: those that share a row of an operand follow one another.

A mask of 4096 × 4096 positions is 32 MB. Where all queries of one head come before those of the next, it has left the L2 by the
time that the next head asks for it and is read from memory once per head: as much traffic as the scores. With heads innermost
it is read once. Rows lie where they lay; only the nest's order changes, so no backend has to know.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fusion_advisor.ir.program import ADDRESSED, ITEM_BYTES, Program

_WIDE_ROW_BYTES = 1024
"""Neighbours in the new order are distant in memory. Narrower rows would leave DRAM pages half used and share cache lines with
rows of much later blocks."""


def share_rows(program: Program) -> Program:
    """Put the row dims that the most bytes are broadcast over innermost.

    With a mask that heads share and a bias that the batch shares both come to lie inside the queries: every row of either is
    asked for again within batch × heads rows. Dims that nothing is broadcast over keep their order.

    Args:
        program: one loop nest.

    Returns:
        the nest with its row dims in another order, or as it was where nothing wide is broadcast.
    """
    rows = range(len(program.dims) - 1)
    if not program.is_reduced or len(rows) < 2 or not _has_wide_rows(program):
        return program
    shared = _shared_bytes(program)
    order = (*sorted(rows, key=lambda dim: shared[dim]), len(rows))
    return program if order == tuple(range(len(program.dims))) else _reordered(program, order)


def _has_wide_rows(program: Program) -> bool:
    """Whether whatever has an element at every place of the nest has its rows in one piece each, wide enough to stand alone."""
    places = [(program.operands[v.operand].dtype, v.strides) for v in program.values if v.op == "load"]
    places += [(program.operands[store.operand].dtype, store.strides) for store in program.stores]
    return all(
        strides[-1] in (1, 2) and program.dims[-1] * ITEM_BYTES[dtype] >= _WIDE_ROW_BYTES
        for dtype, strides in places
        if 0 not in strides
    )


def _shared_bytes(program: Program) -> list[int]:
    """For each row dim the bytes of the loads that it walks past.

    What all rows share, as a weight, is no such load; nor is a gathered one, whose rows are read in any order.
    """
    last = len(program.dims) - 1
    found = [0] * last
    for value, walked in zip(program.values, program.depends_on(), strict=True):
        if value.op == "load" and value.strides[-1] and not value.args and len(walked) > 1:
            size = prod(program.dims[dim] for dim in walked) * ITEM_BYTES[program.operands[value.operand].dtype]
            for dim in set(range(last)) - walked:
                found[dim] += size
    return found


def _reordered(program: Program, order: tuple[int, ...]) -> Program:
    """The same nest with its dims in this order."""
    values = tuple(
        replace(value, strides=tuple(value.strides[dim] for dim in order)) if value.op in ADDRESSED
        else replace(value, dim=order.index(value.dim)) if value.op in ("index", "size")
        else value
        for value in program.values
    )  # fmt: skip
    stores = tuple(replace(store, strides=tuple(store.strides[dim] for dim in order)) for store in program.stores)
    return replace(program, dims=tuple(program.dims[dim] for dim in order), values=values, stores=stores)
