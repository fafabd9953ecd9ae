"""Means and maxima over small windows of images: one load for each place of a window, guarded where the window leaves the image.

torch's kernel takes 228 of 1,290 µs of a PoolFormer step (bf16, H200) for means of 3 x 3. In a chain the pointwise ops after it
cost no traffic. A window is at most 25 elements, which neighbours read from the same cache lines.
Figures: ``docs/measurements/compile_ahead.md``.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusion_advisor.ir.affine_index import Index, Place
from fusion_advisor.ir.dtypes import FLOATS, CannotLower, argument_of, compute_dtype
from fusion_advisor.ir.program import ARITHMETIC, ROUNDINGS
from fusion_advisor.lowering.builder.builder import Rule
from fusion_advisor.lowering.builder.values import has_reduction
from fusion_advisor.records import OpNode, Ref

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering

_MOST_PLACES = 25
_MOST_REPEATED = 64
"""Operations for each element of the result that a plain sequence of ops would not repeat.

An H200 computes about 50 operations in fp32 in the time in which it reads and writes one element of 16 bits.
"""
_CHEAP = frozenset(["add", "sub", "mul", "neg", "abs", "maximum", "minimum", "where", "cast", "round_float16", "round_bfloat16"])
_DEAR = 8
"""Operations for a division, a root or another function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """One dim of an image and the windows along it.

    Attributes:
        size: of the image.
        window: places of a window.
        step: from one window to the next.
        pad: places before the image, and after it.
        apart: from one place of a window to the next.
        start: the first place of the running window.
    """

    size: int
    window: int
    step: int
    pad: int
    apart: int
    start: Place

    def place(self, number: int) -> Place:
        """The place of an element of the window."""
        return self.start.moved(number * self.apart)


def _numbers(op: OpNode, position: int, name: str, default: int | None) -> tuple[int, int]:
    """A number for each of the two dims; one number counts for both, none at all is the default."""
    given = argument_of(op, position, name, ())
    numbers = [given] if isinstance(given, int) else list(given) if isinstance(given, tuple | list) else []
    whole = [number for number in numbers if isinstance(number, int)] or ([] if default is None else [default])
    if len(whole) not in (1, 2) or len(whole) < len(numbers):
        raise CannotLower("FA601", f"{op.target} by {given!r} has no lowering")
    return whole[0], whole[-1]


def _axes(lowering: Lowering, op: OpNode, where: Index, *, apart_at: int | None) -> tuple[_Axis, _Axis]:
    source = op.args[0]
    if not isinstance(source, Ref):
        raise CannotLower("FA601", f"{op.target} of {source!r} has no lowering")
    meta = lowering.meta(source.index)
    if meta.dtype not in FLOATS:
        raise CannotLower("FA601", f"{op.target} of {meta.dtype} has no lowering")
    windows = _numbers(op, 1, "kernel_size", None)
    if math.prod(windows) > _MOST_PLACES:
        raise CannotLower(
            "FA601", f"{op.target} over windows of {windows[0]} x {windows[1]}: a kernel reads at most {_MOST_PLACES} elements"
        )
    steps = windows if argument_of(op, 2, "stride", ()) in ((), []) else _numbers(op, 2, "stride", None)
    pads = _numbers(op, 3, "padding", 0)
    apart = (1, 1) if apart_at is None else _numbers(op, apart_at, "dilation", 1)
    first, second = (
        _Axis(size=size, window=window, step=step, pad=pad, apart=gap, start=place.scaled(step).moved(-pad))
        for size, window, step, pad, gap, place in zip(meta.shape[-2:], windows, steps, pads, apart, where[-2:], strict=True)
    )
    return first, second


def _inside(lowering: Lowering, axis: _Axis, number: int, *, margin: int = 0) -> int:
    """Whether an element of the window lies in the image, or in the image and a margin on both sides: a boolean value."""
    place, guard = axis.place(number), lowering.const(True, "bool")
    low, high = lowering.range_of(place)
    last = axis.size + margin
    for is_needed, compare, limit in ((low < -margin, "ge", -margin), (high >= last, "lt", last)):
        if is_needed:
            side = lowering.make(compare, lowering.place_value(place), lowering.const(limit, "int64"), dtype="bool")
            guard = lowering.make("and", guard, side, dtype="bool")
    return guard


def _elements(lowering: Lowering, op: OpNode, where: Index, axes: tuple[_Axis, _Axis], fill: float) -> list[int]:
    """The elements of a window row by row, ``fill`` where there are none."""
    source, dtype = op.args[0], compute_dtype(op.outputs[0].dtype)
    assert isinstance(source, Ref)
    sides = [[_inside(lowering, axis, number) for number in range(axis.window)] for axis in axes]
    found, read = [], []
    for row, column in itertools.product(range(axes[0].window), range(axes[1].window)):
        places = (*where[:-2], axes[0].place(row), axes[1].place(column))
        guard = lowering.make("and", sides[0][row], sides[1][column], dtype="bool")
        if lowering.constant_of(guard) is False:
            found.append(lowering.const(fill, dtype))
            continue
        if lowering.constant_of(guard) is True:
            element = chosen = lowering.argument(op, 0, places)
        else:
            element = lowering.guarded(source.index, places, guard, dtype)
            chosen = lowering.make("where", guard, element, lowering.const(fill, dtype), dtype=dtype)
        if has_reduction(lowering, element):
            raise CannotLower(
                "FA604", f"{op.target} of what a row reduction computes: it would be computed for each window again"
            )
        read.append(element)
        found.append(element if fill == 0.0 and _is_zero_outside(lowering, element) else chosen)
    if not read:
        raise CannotLower("FA601", f"{op.target} over windows of nothing but padding has no lowering")
    _refuse_repeated_work(lowering, op, read, axes)
    return found


def _is_zero_outside(lowering: Lowering, number: int) -> bool:
    """Whether a value is an element as it lies in memory, read under a guard: it is 0 where it is not read."""
    value = lowering.values[number]
    value = lowering.values[value.args[0]] if value.op == "cast" else value
    return value.op == "load" and value.guard is not None


def _refuse_repeated_work(lowering: Lowering, op: OpNode, elements: list[int], axes: tuple[_Axis, ...]) -> None:
    """Refuse what would be computed many times over because many windows hold it.

    Raises:
        CannotLower: it costs more than to write it to memory once.
    """
    waiting, seen, operations = list(elements), set(elements), 0
    while waiting:
        value = lowering.values[waiting.pop()]
        if value.dtype in ("float32", "float64") and value.op in (*ARITHMETIC, "where"):
            operations += 1 if value.op in _CHEAP else _DEAR
        fresh = set(value.args) - seen
        seen |= fresh
        waiting += fresh
    # Windows that do not overlap compute each element once.
    once = min(1.0, math.prod(axis.step for axis in axes) / len(elements))
    if operations * (1.0 - once) > _MOST_REPEATED:
        raise CannotLower("FA604", f"{op.target} would compute {operations} operations again for every window")


def _count(lowering: Lowering, axis: _Axis, dtype: str, *, is_padded: bool) -> int:
    """How many places of a window count along one dim: those of the image, or of the image and its padding.

    Each condition, which the loads have too, counts for one. Bounds of the window would take 64-bit integers: those of 3 x 3 took
    a fifth of the time in which Triton compiles a mean.
    """
    sides = [_inside(lowering, axis, number, margin=axis.pad if is_padded else 0) for number in range(axis.window)]
    open_sides = [side for side in sides if not isinstance(lowering.constant_of(side), bool)]
    total = lowering.const(float(sum(lowering.constant_of(side) is True for side in sides)), dtype)
    for side in open_sides:
        one = lowering.make("where", side, lowering.const(1.0, dtype), lowering.const(0.0, dtype), dtype=dtype)
        total = lowering.make("add", total, one, dtype=dtype)
    return total


def _mean(lowering: Lowering, op: OpNode, where: Index) -> int:
    """The sum of a window, row by row as torch sums it, over the number of its places or over a number that is given."""
    axes = _axes(lowering, op, where, apart_at=None)
    dtype, divisor = compute_dtype(op.outputs[0].dtype), argument_of(op, 6, "divisor_override")
    total = lowering.const(0.0, dtype)  # so that a sum of negative zeros is torch's positive one
    for element in _elements(lowering, op, where, axes, 0.0):
        total = lowering.make("add", total, element, dtype=dtype)
    if divisor is None:
        is_padded = bool(argument_of(op, 5, "count_include_pad", True))
        counts = [_count(lowering, axis, dtype, is_padded=is_padded) for axis in axes]
        number = lowering.make("mul", *counts, dtype=dtype)
    elif isinstance(divisor, int) and not isinstance(divisor, bool):
        number = lowering.const(float(divisor), dtype)
    else:
        raise CannotLower("FA601", f"{op.target} divided by {divisor!r} has no lowering")
    return _over(lowering, op, total, number)


def _over(lowering: Lowering, op: OpNode, total: int, number: int) -> int:
    """A sum over a number; times its reciprocal where the result is rounded to 16 bits.

    The number is the same for all channels of a place, and a division of each element takes as long as half of the sum.
    """
    if lowering.is_exact or op.outputs[0].dtype not in ROUNDINGS:
        return lowering.make("div", total, number)
    known = lowering.constant_of(number)
    dtype = lowering.values[number].dtype
    part = lowering.const(1.0 / known, dtype) if known else lowering.make("reciprocal", number)
    return lowering.make("mul", total, part)


def _maximum(lowering: Lowering, op: OpNode, where: Index) -> int:
    """The greatest element of a window; a NaN is greater than all."""
    axes = _axes(lowering, op, where, apart_at=4)
    dtype = compute_dtype(op.outputs[0].dtype)
    elements = _elements(lowering, op, where, axes, -math.inf)
    return functools.reduce(lambda one, other: lowering.make("maximum", one, other, dtype=dtype), elements)


WINDOWED: dict[str, Rule] = {"avg_pool2d": _mean, "max_pool2d": _maximum}
