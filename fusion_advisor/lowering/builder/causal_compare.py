"""Comparisons of positions while a chain is lowered: causal masks get one canonical form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion_advisor.ir.affine_index import Place
from fusion_advisor.ir.program import Value

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering

_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_FAR = 2**30
"""Offsets from here on are left to plain arithmetic: kernels compare places in 32 bits."""


def compared(lowering: Lowering, name: str, left: int, right: int) -> int | None:
    """Return the value of a comparison of two positions in the one form, or None where it is not of two loop variables.

    Args:
        lowering: what the values belong to.
        name: ``lt``, ``le``, ``gt`` or ``ge``.
        left: number of an int64 value.
        right: number of another.
    """
    if name not in _MIRRORED:
        return None
    places = [place_of(lowering, number) for number in (left, right)]
    if places[0] is None or places[1] is None:
        return None
    return compared_places(lowering, name, places[0], places[1])


def compared_places(lowering: Lowering, name: str, left: Place, right: Place) -> int | None:
    """The same for two places."""
    extents = lowering.nest.extents
    difference = left.plus(right.scaled(-1))
    terms = tuple((variable, step) for variable, step in difference.terms if step and extents[variable] != 1)
    if difference.gathered or sorted(step for _, step in terms) != [-1, 1]:
        return None
    (row, _), (column, step) = sorted(terms)
    shift = difference.shift * step
    if step < 0:
        name = _MIRRORED[name]
    # column - row + shift <name> 0, with whole numbers: column <= row + offset, or not that.
    offset = -shift - (name in ("lt", "ge"))
    if abs(offset) >= _FAR:
        return None
    if offset >= extents[column] - 1 or offset < 1 - extents[row]:
        return lowering.const((offset >= 0) == (name in ("lt", "le")), "bool")
    limit = lowering.emit(Value(op="index", dim=row, dtype="int64"))
    if offset and offset == extents[column] - extents[row]:
        sizes = [lowering.emit(Value(op="size", dim=dim, dtype="int64")) for dim in (column, row)]
        limit = lowering.make("add", limit, lowering.make("sub", *sizes))
    elif offset:
        limit = lowering.make("add", limit, lowering.const(offset, "int64"))
    is_within = lowering.make("le", lowering.emit(Value(op="index", dim=column, dtype="int64")), limit, dtype="bool")
    return is_within if name in ("lt", "le") else lowering.make("not", is_within, dtype="bool")


def place_of(lowering: Lowering, number: int) -> Place | None:
    """The place that a value is by its formula alone, as positions made by ``arange`` are; None for any other value."""
    value = lowering.values[number]
    if value.op == "index":
        return Place(((value.dim, 1),))
    if value.op == "const" and value.dtype == "int64":
        return Place().moved(int(value.constant or 0))
    if value.op not in ("add", "sub", "mul") or value.dtype != "int64":
        return None
    left, right = (place_of(lowering, arg) for arg in value.args)
    if left is None or right is None:
        return None
    if value.op == "mul":
        return left.scaled(right.shift) if right.is_fixed else right.scaled(left.shift) if left.is_fixed else None
    return left.plus(right.scaled(1 if value.op == "add" else -1))
