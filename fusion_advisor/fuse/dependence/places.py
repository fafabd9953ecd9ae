"""Ops that read or write rows by their place: kept ones read kept rows, and junk must be no place outside of a table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from fusion_advisor.fuse.dependence.call import Call, Ruled, joined, table
from fusion_advisor.fuse.dependence.kept import Affine, Axes, Kept, Sign, Span, Stops, moved

_OUTSIDE = "may read padding at a place outside of its table"


def _stop_unless_inside(call: Call, rows: Kept, dim: int, place: Kept, size: Any, *, wraps: bool = False) -> None:
    """Stop where a place of what is kept may be one of junk, or a place of junk may be none.

    Args:
        call: of the op.
        rows: the table.
        dim: of the table that is looked up.
        place: what is looked up.
        size: of the table's dim.
        wraps: places are counted from the end where they are negative.
    """
    if rows.is_long(dim):
        if len(rows.axes[dim]) > 1:
            raise Stops("takes a part of a dim that is flattened")
        if wraps and place.sign is Sign.ANY:
            raise Stops("may count a place from the end")
    if place.places and not place.is_safe_place(call.padded.written(size)):
        raise Stops(_OUTSIDE)


def embedded(call: Call) -> Kept:
    """Look rows of a table up."""
    rows, place = call.tensor("weight"), call.tensor("indices")
    _stop_unless_inside(call, rows, 0, place, call.given["weight"].meta["val"].shape[0])
    if rows.is_long(1):
        raise Stops("looks rows up that are padded")
    return call.made(_read(rows, [place], (*place.axes, rows.axes[1])))


def _read(rows: Kept, places: list[Kept], axes: Axes) -> Kept:
    return Kept(
        axes=axes, span=rows.span, sign=rows.sign, is_copied=rows.is_copied and all(one.is_copied for one in places),
        is_free=rows.is_free and all(one.is_free for one in places),
    )  # fmt: skip


def index_selected(call: Call) -> Kept:
    """Look slices of a dim up."""
    rows, place = call.tensor("self"), call.tensor("index")
    dim = call.dim("dim", len(rows.axes))
    _stop_unless_inside(call, rows, dim, place, call.given["self"].meta["val"].shape[dim])
    own = place.axes[0] if place.axes else ()
    return call.made(_read(rows, [place], (*rows.axes[:dim], own, *rows.axes[dim + 1 :])))


def gathered(call: Call) -> Kept:
    """Look elements of a dim up, at each place of the others."""
    rows, place = call.tensor("self"), call.tensor("index")
    dim = call.dim("dim", len(rows.axes))
    _stop_unless_same(rows, place, dim)
    _stop_unless_inside(call, rows, dim, place, call.given["self"].meta["val"].shape[dim])
    return call.made(_read(rows, [place], place.axes))


def _stop_unless_same(rows: Kept, place: Kept, dim: int) -> None:
    for other, own in enumerate(place.axes):
        if other != dim and (rows.is_long(other) or place.is_long(other)) and own != rows.axes[other]:
            raise Stops("joins values whose dims are flattened in different ways")


def scattered(call: Call) -> Kept:
    """Write elements to places of a dim that does not grow."""
    rows, place = call.tensor("self"), call.tensor("index")
    dim = call.dim("dim", len(rows.axes))
    source = call.given.get("src")
    given = [rows, place, *([call.state(source)] if isinstance(source, Node) else [])]
    for one in given:
        if one.is_long(dim):
            raise Stops("writes to places of a dim that is padded")
        if rows.fill is None or one is not rows:
            _stop_unless_same(one, place, dim)
    _stop_unless_inside(call, rows, dim, place, call.given["self"].meta["val"].shape[dim])
    axes = tuple(own if rows.fill is None or at == dim else place.axes[at] for at, own in enumerate(rows.axes))
    number = call.number("value", 0)
    is_finite = isinstance(number, bool | int | float) and abs(number) < float("inf")
    span = max(Span.FINITE if is_finite else Span.ANY, *(one.span for one in given))
    return call.made(
        Kept(axes=axes, span=span, is_copied=all(one.is_copied for one in given), is_free=all(one.is_free for one in given))
    )


def indexed(call: Call) -> Kept:
    """Look elements up by several tensors of places at once."""
    rows = call.tensor("self")
    shape = call.given["self"].meta["val"].shape
    nodes = {dim: node for dim, node in enumerate(call.get("indices")) if node is not None}
    if any(node.meta["val"].dtype in (torch.bool, torch.uint8) for node in nodes.values()):
        raise Stops("chooses elements by a mask")
    dims, places = list(nodes), [call.state(node) for node in nodes.values()]
    for dim, place in zip(dims, places, strict=True):
        _stop_unless_inside(call, rows, dim, place, shape[dim], wraps=True)
    axes, targets = joined(places)
    # The looked-up dims take the place of those that they index; ahead of all where these are apart.
    start = dims[0] if dims and dims == list(range(dims[0], dims[-1] + 1)) else 0
    left = [dim for dim in range(len(rows.axes)) if dim not in dims]
    outer, later = [dim for dim in left if dim < start], [dim for dim in left if dim >= start]
    whole = (*(rows.axes[dim] for dim in outer), *axes, *(rows.axes[dim] for dim in later))
    there = {place: ordinal for ordinal, place in enumerate(Kept(axes=whole).places)}
    stays = {dim: at for at, dim in enumerate(outer)} | {dim: at + len(outer) + len(axes) for at, dim in enumerate(later)}
    target = {n: there[stays[dim], at] for n, (dim, at) in enumerate(rows.places) if dim in stays}
    shifts = [there[dim + len(outer), at] for dim, at in Kept(axes=axes).places]
    affine = _composed(rows, dims, places, targets, target, shifts)
    target |= _same_index(call, rows, dims, places, targets, shifts)
    facts = moved(rows, whole, target).facts if len(set(target.values())) == len(target) else {}
    return call.made(replace(_read(rows, places, whole), facts=facts, affine=affine, fill=rows.fill))


def _same_index(
    call: Call, rows: Kept, dims: list[int], places: list[Kept], targets: list[dict[int, int]], shifts: list[int]
) -> dict[int, int]:
    """Return, by ordinal of an axis of the table each of whose elements is looked up at its own index, its ordinal there."""
    found = {}
    for dim, place, own in zip(dims, places, targets, strict=True):
        axis = _axis_of(place)
        for ordinal in rows.ordinals(dim):
            if axis is not None and call.padded.difference(rows.sizes[ordinal], place.sizes[axis]) == 0:
                found[ordinal] = shifts[own[axis]]
    return found


def _axis_of(place: Kept) -> int | None:
    """Return the axis along which each place is its own index; None where there is none."""
    affine = place.affine
    if affine is None or affine.offset != 0 or len(affine.times) != 1:
        return None
    ((axis, times),) = affine.times.items()
    return axis if times == 1 else None


def _composed(
    rows: Kept, dims: list[int], places: list[Kept], targets: list[dict[int, int]], target: dict[int, int], shifts: list[int]
) -> Affine | None:
    """Return elements as a function of their place where those of the table are, and the places looked up too."""
    if rows.affine is None:
        return None
    found = Affine({}, rows.affine.offset)
    for axis, times in rows.affine.times.items():
        dim, _ = rows.places[axis]
        if dim not in dims:
            found = found.plus(Affine({target[axis]: 1}, 0), times)
            continue
        at = dims.index(dim)
        place = places[at].affine
        if place is None:
            return None
        found = found.plus(Affine({shifts[targets[at][own]]: by for own, by in place.times.items()}, place.offset), times)
    return found


def one_hot(call: Call) -> Kept:
    """Mark each number's place."""
    value = call.tensor("self")
    count = call.number("num_classes", -1)
    if not isinstance(count, int) or count < 0:
        raise Stops("counts how many numbers there are")
    if value.places and not value.is_safe_place(count):
        raise Stops(_OUTSIDE)
    axes: Any = (*value.axes, call.padded.factors(count))
    return call.made(Kept(axes=axes, span=Span.FINITE, sign=Sign.NOT_NEGATIVE, is_copied=value.is_copied, is_free=value.is_free))


def bucketed(call: Call) -> Kept:
    """Find each number's place among boundaries."""
    value, bounds = call.tensor("self"), call.tensor("boundaries")
    if bounds.places:
        raise Stops("looks rows up that are padded")
    size = call.given["boundaries"].meta["val"].shape[0]
    bound = size + 1 if isinstance(size, int) else None
    return call.made(
        Kept(axes=value.axes, span=Span.FINITE, sign=Sign.NOT_NEGATIVE, bound=bound, is_copied=value.is_copied,
             is_free=value.is_free and bounds.is_free)
    )  # fmt: skip


RULES = table({
    "embedding": embedded,
    "index_select": index_selected,
    "gather": gathered,
    "scatter scatter_add": scattered,
    "index": Ruled(indexed),
    "one_hot": one_hot,
    "bucketize": bucketed,
})  # fmt: skip
