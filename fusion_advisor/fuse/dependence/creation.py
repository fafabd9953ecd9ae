"""Ops that make tensors of sizes and numbers, and triangles of matrices."""

from __future__ import annotations

from typing import Any

import torch

from fusion_advisor.fuse.dependence.call import Call, Ruled, table
from fusion_advisor.fuse.dependence.kept import Affine, Kept, Sign, Span, Stops, Where
from fusion_advisor.runtime.torch_internals import symbolic_sizes


def counted(call: Call) -> Kept:
    """Count up: an element is its place, times a step."""
    start, step = call.number("start", 0), call.number("step", 1)
    value = call.values[0]
    axes = call.plain(value)
    is_whole = not value.is_floating_point() and value.dtype.itemsize >= 4
    is_known = is_whole and isinstance(step, int) and not isinstance(start, float)
    places = Kept(axes=axes).places
    affine = Affine({0: step}, start) if is_known and places else None
    rises = not isinstance(step, float) and symbolic_sizes.is_at_least(step, 0)
    is_positive = rises and not isinstance(start, float) and symbolic_sizes.is_at_least(start, 0)
    return call.made(
        Kept(axes=axes, affine=affine, span=Span.FINITE, sign=Sign.NOT_NEGATIVE if is_positive else Sign.ANY,
             is_copied=not places, is_free=True)
    )  # fmt: skip


_FILLS = {"ones": 1, "zeros": 0, "new_ones": 1, "new_zeros": 0, "ones_like": 1, "zeros_like": 0}


def filled(call: Call) -> Kept:
    """Repeat one number."""
    number: Any = _FILLS[call.name] if call.name in _FILLS else call.number("fill_value", call.get("s"))
    value = call.values[0]
    is_known = isinstance(number, bool | int | float)
    if is_known:
        number = torch.full((), number, dtype=value.dtype).item()
    sign = Sign.POSITIVE if is_known and number > 0 else Sign.NOT_NEGATIVE if is_known and number == 0 else Sign.ANY
    return call.made(
        Kept(axes=call.plain(value), fill=number if is_known else None, span=_span(number) if is_known else Span.ANY,
             sign=sign, is_copied=True, is_free=is_known)
    )  # fmt: skip


def _span(number: Any) -> Span:
    if abs(number) < float("inf"):
        return Span.FINITE
    return Span.FINITE_OR_MINUS_INFINITY if number < 0 else Span.ANY


def identity(call: Call) -> Kept:
    """Ones on a diagonal."""
    value = call.values[0]
    axes = call.plain(value)
    known: dict[Where, float | bool] = {}
    sizes = Kept(axes=axes).sizes
    if len(sizes) == 2 and sizes[0] == sizes[1]:
        known = {Where(0, 1): 0, Where(1, 0): 0}
    return call.made(Kept(axes=axes, facts=known, span=Span.FINITE, sign=Sign.NOT_NEGATIVE, is_copied=not sizes, is_free=True))


def triangle(call: Call) -> Kept:
    """Put zeros above or below a diagonal of the last two dims."""
    value = call.tensor("self")
    rank = len(value.axes)
    last = call.number("diagonal", 0)
    is_lower = "tril" in str(call.node.target)
    facts: dict[Where, float | bool] = {}
    live: set[tuple[int, int]] = set()
    zero: float | bool = False if str(call.values[0].dtype) == "torch.bool" else 0
    for dim in (rank - 2, rank - 1):
        if value.is_long(dim) and len(value.axes[dim]) > 1:
            raise Stops("takes a part of a dim that is flattened")
    pairs = [(one, other) for one in value.ordinals(rank - 2) for other in value.ordinals(rank - 1)]
    for row, col in pairs:  # at most one pair
        longer = call.padded.difference(value.sizes[col], value.sizes[row])
        if longer is None:
            continue
        # How far an element is right of the first diagonal: at least, or at most.
        places = {
            Where(row, col): (longer + 1, None),
            Where(col, row): (None, longer - 1),
            Where(row, col, True): (longer, longer),
        }
        for where, (least, most) in places.items():
            is_kept = _is_inside(is_lower, last, least, most)
            known = value.known(where)
            if is_kept is False:
                facts[where] = zero
            elif is_kept and known is not None:
                facts[where] = known
        diagonal = facts.get(Where(row, col, True))
        if (diagonal is not None and abs(diagonal) < float("inf")) or (row, col) in value.live:
            live.add((row, col))
    is_same = bool(value.ordinals(rank - 2)) == bool(value.ordinals(rank - 1))
    return call.made(
        Kept(axes=value.axes, facts=facts, live=frozenset(live), span=value.span, sign=min(value.sign, Sign.NOT_NEGATIVE),
             is_copied=value.is_copied and not pairs and is_same and not value.ordinals(rank - 1), is_free=value.is_free)
    )  # fmt: skip


def _is_inside(is_lower: bool, last: Any, least: Any, most: Any) -> bool | None:
    """Whether elements stay that are so far right of the first diagonal; None where some do."""
    if is_lower:
        if most is not None and symbolic_sizes.is_at_least(last - most, 0):
            return True
        return False if least is not None and symbolic_sizes.is_at_least(least - last, 1) else None
    if least is not None and symbolic_sizes.is_at_least(least - last, 0):
        return True
    return False if most is not None and symbolic_sizes.is_at_least(last - most, 1) else None


RULES = table({
    "arange": Ruled(counted, {"end"}),
    "full": Ruled(filled, {"size"}, reads_shapes_alone=True),
    "ones zeros new_ones new_zeros new_full": Ruled(filled, {"size"}, reads_shapes_alone=True),
    "ones_like zeros_like full_like": Ruled(filled, reads_shapes_alone=True),
    "scalar_tensor": Ruled(filled, reads_shapes_alone=True),
    "eye": Ruled(identity, {"n", "m"}),
    "tril triu": triangle,
})  # fmt: skip
