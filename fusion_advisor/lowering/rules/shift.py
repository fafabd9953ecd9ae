"""Values that lie elsewhere in the result: padded with a number, rolled around, and repeated.

ATen pads by a fill and a copy: 17 pads of a MobileNetV2 step (bf16, 16 images, H200) take 0.26 of 0.89 ms. Inside a kernel a pad
is a choice between what the chain computes and a constant, and a repeat reads the same elements once more. The gradient of a
slice is a pad with zeros: rotary embeddings take four of them in each layer's backward pass. What chains take of a training step:
``docs/measurements/training_chains.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion_advisor.ir.affine_index import ORIGIN, CutLoop, Index, Place, reshaped
from fusion_advisor.ir.dtypes import CannotLower, argument_of, compute_dtype
from fusion_advisor.lowering.builder.builder import Rule
from fusion_advisor.lowering.builder.collapse_loops import MOST_DIMS
from fusion_advisor.lowering.builder.guards import decided_by
from fusion_advisor.lowering.builder.values import has_reduction
from fusion_advisor.records import OpNode, Ref

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering


def _source(lowering: Lowering, op: OpNode) -> tuple[int, tuple[int, ...]]:
    source = op.args[0]
    if not isinstance(source, Ref):
        raise CannotLower("FA601", f"{op.target} of {source!r} has no lowering")
    return source.index, lowering.meta(source.index).shape


def _integers(op: OpNode, position: int, name: str) -> list[int]:
    given = argument_of(op, position, name, ())
    numbers = [given] if isinstance(given, int) else given
    if not isinstance(numbers, tuple | list) or not all(isinstance(one, int) for one in numbers):
        raise CannotLower("FA601", f"{op.target} by {given!r} has no lowering")
    return [one for one in numbers if isinstance(one, int)]


def _pad(lowering: Lowering, op: OpNode, where: Index) -> int:
    """``x`` where the position lies in it, else a number; a negative amount cuts elements off."""
    _, shape = _source(lowering, op)
    is_named = op.target.startswith("aten.pad.")
    mode = argument_of(op, 2, "mode", "constant") if is_named else "constant"
    if mode != "constant":
        raise CannotLower("FA601", f"{op.target} with mode {mode!r} has no lowering")
    amounts, fill = _integers(op, 1, "pad"), argument_of(op, 3 if is_named else 2, "value", 0)
    if not isinstance(fill, int | float | None):
        raise CannotLower("FA601", f"{op.target} with {fill!r} has no lowering")
    places, guard = list(where), None
    for number in range(len(amounts) // 2):
        dim = len(shape) - 1 - number
        places[dim] = where[dim].moved(-amounts[2 * number])
        guard = _both(lowering, guard, _within(lowering, places[dim], shape[dim]))
    return _or_number(lowering, op, tuple(places), guard, fill or 0)


def _within(lowering: Lowering, place: Place, size: int) -> int | None:
    """Whether a place lies in a dim of some size; None where it always does."""
    low, high = lowering.range_of(place)
    guard = None
    for is_needed, compare, limit in ((low < 0, "ge", 0), (high >= size, "lt", size)):
        if is_needed:
            side = lowering.make(compare, lowering.place_value(place), lowering.const(limit, "int64"), dtype="bool")
            guard = _both(lowering, guard, side)
    return guard


def _both(lowering: Lowering, guard: int | None, other: int | None) -> int | None:
    if guard is None or other is None:
        return other if guard is None else guard
    return lowering.make("and", guard, other, dtype="bool")


def _or_number(lowering: Lowering, op: OpNode, places: Index, guard: int | None, fill: float) -> int:
    """An element of the op's argument where a guard holds, else a number.

    Raises:
        CannotLower: a row reduction computes the element, and within one row some columns are there and others are not.
    """
    if guard is None:
        return lowering.argument(op, 0, places)
    dtype = compute_dtype(op.outputs[0].dtype)
    element = lowering.guarded(_source(lowering, op)[0], places, guard, dtype)
    if has_reduction(lowering, element):
        deciding = decided_by(lowering, guard)
        if deciding is None or not deciding.isdisjoint(lowering.reduced):
            raise CannotLower("FA604", f"{op.target} of what a row reduction computes: it would read columns that are not there")
    return lowering.make("where", guard, element, lowering.const(fill, dtype), dtype=dtype)


def _slice_backward(lowering: Lowering, op: OpNode, where: Index) -> int:
    """The gradient of ``x[start:end]``: the slice's own where the position lies in it, else 0."""
    _, shape = _source(lowering, op)
    dim, start, _, step = op.args[2:6]
    if not isinstance(dim, int) or not isinstance(start, int) or step != 1:
        raise CannotLower("FA601", f"{op.target} with a step of {step} has no lowering")
    dim %= len(where)
    size = op.outputs[0].shape[dim]
    first = min(max(start + size if start < 0 else start, 0), size)
    places = (*where[:dim], where[dim].moved(-first), *where[dim + 1 :])
    return _or_number(lowering, op, places, _within(lowering, places[dim], shape[dim]), 0)


def _select_backward(lowering: Lowering, op: OpNode, where: Index) -> int:
    """The gradient of ``x[index]``: its own at that position, else 0."""
    dim, index = op.args[2:4]
    if not isinstance(dim, int) or not isinstance(index, int):
        raise CannotLower("FA601", f"{op.target} at a place that is not known has no lowering")
    dim %= len(where)
    place = where[dim].moved(-(index % op.outputs[0].shape[dim]))
    return _or_number(lowering, op, (*where[:dim], *where[dim + 1 :]), _within(lowering, place, 1), 0)


def _roll(lowering: Lowering, op: OpNode, where: Index) -> int:
    """``x[(position - shift) mod size]`` along each rolled dim."""
    _, shape = _source(lowering, op)
    shifts, dims = _integers(op, 1, "shifts"), _integers(op, 2, "dims")
    if not dims:
        raise CannotLower("FA601", f"{op.target} over all elements as one row has no lowering")
    places = list(where)
    for shift, dim in zip(shifts, dims, strict=True):
        size = shape[dim]
        back = shift % size if size else 0
        low, high = lowering.range_of(places[dim].moved(-back))
        if low < 0 <= high:
            moved = lowering.place_value(places[dim].moved(size - back))
            places[dim] = Place(gathered=((lowering.make("remainder", moved, lowering.const(size, "int64"), dtype="int64"), 1),))
        else:
            places[dim] = places[dim].moved(size - back if high < 0 else -back)
    return lowering.argument(op, 0, tuple(places))


def _repeat(lowering: Lowering, op: OpNode, where: Index) -> int:
    """``x[position mod size]`` along each dim; dims of the result ahead of ``x``'s own have no place in it."""
    _, shape = _source(lowering, op)
    own = zip(shape, where[len(where) - len(shape) :], op.outputs[0].shape[len(where) - len(shape) :], strict=True)
    return lowering.argument(op, 0, tuple(_in_copy(lowering, place, size, whole) for size, place, whole in own))


def _in_copy(lowering: Lowering, place: Place, size: int, whole: int) -> Place:
    """Where a place of a repeated dim lies in the dim before.

    Args:
        lowering: the chain's.
        place: of the result.
        size: of the dim before.
        whole: of the result's dim, a multiple of ``size``.

    Raises:
        CutLoop: a loop runs over the copies and their elements and must be cut between them.
    """
    if size == 1:
        return ORIGIN
    if size == whole:
        return place
    low, high = lowering.range_of(place)
    if low // size == high // size:
        return place.moved(-int(low // size) * size)
    try:
        return reshaped((place,), (whole,), (whole // size, size), lowering.nest.extents)[1]
    except CutLoop:
        if sum(extent != 1 for extent in lowering.nest.extents) < MOST_DIMS:
            raise
    except CannotLower:
        pass  # what is read is moved or cut, as by a slice, and no loop begins where a copy does
    rest = lowering.make("remainder", lowering.place_value(place), lowering.const(size, "int64"), dtype="int64")
    return Place(gathered=((rest, 1),))


SHIFTED: dict[str, Rule] = {
    "constant_pad_nd": _pad, "pad": _pad, "roll": _roll, "repeat": _repeat, "slice_backward": _slice_backward,
    "select_backward": _select_backward,
}  # fmt: skip
