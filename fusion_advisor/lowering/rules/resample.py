"""Images read at other resolutions: nearest neighbours, and linear interpolation between two or four of them.

Positions are computed as torch's CUDA kernels compute them (``aten/src/ATen/native/cuda/UpSample.cuh``): in fp32, and for doubles
in fp64, so that the same neighbours are read. torch's kernel for channels-last images takes 1.40 of 4.4 ms of a SegFormer-B2 step
(bf16, 4 images of 512 pixels a side, H200) for three maps that a copy would write in 0.1 ms.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusion_advisor.ir.affine_index import Index, Place, reshaped
from fusion_advisor.ir.dtypes import CannotLower, argument_of
from fusion_advisor.lowering.builder.builder import Rule
from fusion_advisor.records import Arg, OpNode, Ref

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering


_MOST_CUT = 2
"""Dims that are cut into neighbours and their copies: a third one would make a loop nest of more dims than a kernel has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """One resized dim.

    Attributes:
        before: its size in the argument.
        after: its size in the result.
        factor: the scale that the call names; None where it names sizes.
    """

    before: int
    after: int
    factor: float | None

    @property
    def step(self) -> float:
        """Positions of the argument for each of the result."""
        return 1.0 / self.factor if self.factor else self.before / self.after


def _axes(lowering: Lowering, op: OpNode, first_factor: int) -> tuple[_Axis, ...]:
    """The resized dims of a call, whose factors are a list in ``.vec`` and numbers of their own in the other overloads."""
    source = op.args[0]
    if not isinstance(source, Ref):
        raise CannotLower("FA601", f"{op.target} of {source!r} has no lowering")
    shape, made = lowering.meta(source.index).shape, op.outputs[0].shape
    count = len(shape) - 2
    factors: list[Arg] = list(op.args[first_factor : first_factor + count])
    if op.target.endswith(".vec"):
        given = argument_of(op, first_factor, "scale_factors")
        factors = list(given) if isinstance(given, tuple | list) else []
    factors += [dict(op.kwargs).get(name) for name in ("scales_h", "scales_w")] if not factors and count == 2 else []
    numbers = [float(one) if isinstance(one, int | float) and one > 0 else None for one in factors] or [None] * count
    return tuple(
        _Axis(before=before, after=after, factor=factor)
        for before, after, factor in zip(shape[2:], made[2:], [*numbers, *[None] * count][:count], strict=True)
    )


def _position_dtype(op: OpNode) -> str:
    return "float64" if op.outputs[0].dtype == "float64" else "float32"


def _number(lowering: Lowering, value: float, dtype: str) -> int:
    """A constant, rounded as torch holds it."""
    return lowering.const(struct.unpack("f", struct.pack("f", value))[0] if dtype == "float32" else value, dtype)


def _within(lowering: Lowering, position: int, size: int) -> Place:
    """A computed position as a place: the last one where it lies past the end."""
    whole = lowering.cast(position, "int64")
    last = lowering.const(size - 1, "int64")
    return Place(gathered=((lowering.make("minimum", whole, last, dtype="int64"), 1),))


def _nearest(lowering: Lowering, op: OpNode, where: Index) -> int:
    """``x[floor(position * step)]``; a whole number of copies is read by a loop over them, without a computed position."""
    axes = _axes(lowering, op, 2)
    made = op.outputs[0].shape
    is_whole = all(axis.after % axis.before == 0 and axis.step == axis.before / axis.after for axis in axes)
    if is_whole and len(axes) <= _MOST_CUT:
        cut = [*made[:2], *(size for axis in axes for size in (axis.before, axis.after // axis.before))]
        found = reshaped(where, made, tuple(cut), lowering.nest.extents)
        return lowering.argument(op, 0, (*found[:2], *found[2::2]))
    places = []
    for axis, place in zip(axes, where[2:], strict=True):
        at = lowering.cast(lowering.place_value(place), "float32")  # of doubles too
        moved = lowering.make("floor", lowering.make("mul", at, _number(lowering, axis.step, "float32"), dtype="float32"))
        places.append(_within(lowering, moved, axis.before))
    return lowering.argument(op, 0, (*where[:2], *places))


def _linear(lowering: Lowering, op: OpNode, where: Index) -> int:
    """Weighted means of the two neighbours along each resized dim, the last dim first."""
    is_aligned, dtype, axes = bool(argument_of(op, 2, "align_corners", False)), _position_dtype(op), _axes(lowering, op, 3)
    is_on_cpu = op.outputs[0].device == "cpu"
    if all(axis.before == axis.after for axis in axes) and not is_on_cpu:  # torch's CUDA kernels copy then
        return lowering.argument(op, 0, where)
    neighbours = [
        _neighbours(lowering, axis, place, is_aligned=is_aligned, dtype=dtype, is_on_cpu=is_on_cpu)
        for axis, place in zip(axes, where[2:], strict=True)
    ]

    def mean(known: Index, left: list[tuple[Place, Place, int, int]]) -> int:
        if not left:
            return lowering.argument(op, 0, known)
        (low, high, near, far), *others = left
        parts = [
            lowering.make("mul", weight, mean((*known, place), others), dtype=dtype)
            for place, weight in ((low, near), (high, far))
        ]
        return lowering.make("add", *parts, dtype=dtype)

    return mean(where[:2], neighbours)


def _neighbours(
    lowering: Lowering, axis: _Axis, place: Place, *, is_aligned: bool, dtype: str, is_on_cpu: bool
) -> tuple[Place, Place, int, int]:
    """The places of both neighbours and their weights."""
    if axis.before == axis.after and is_on_cpu:  # torch's CPU kernels weigh an element with itself: infinity becomes NaN
        return place, place, _number(lowering, 1.0, dtype), _number(lowering, 0.0, dtype)
    at, half = lowering.cast(lowering.place_value(place), dtype), _number(lowering, 0.5, dtype)
    if is_aligned:
        step = (axis.before - 1) / (axis.after - 1) if axis.after > 1 else 0.0
        position = lowering.make("mul", at, _number(lowering, step, dtype), dtype=dtype)
    else:
        middle = lowering.make(
            "mul", lowering.make("add", at, half, dtype=dtype), _number(lowering, axis.step, dtype), dtype=dtype
        )
        position = lowering.make("sub", middle, half, dtype=dtype)
        position = lowering.make("maximum", position, _number(lowering, 0.0, dtype), dtype=dtype)
    floor = lowering.make("floor", position, dtype=dtype)
    far = lowering.make("sub", position, floor, dtype=dtype)
    near = lowering.make("sub", _number(lowering, 1.0, dtype), far, dtype=dtype)
    after = lowering.make("add", floor, _number(lowering, 1.0, dtype), dtype=dtype)
    return _within(lowering, floor, axis.before), _within(lowering, after, axis.before), near, far


RESAMPLED: dict[str, Rule] = {
    **dict.fromkeys(("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"), _nearest),
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d"), _linear),
}  # fmt: skip
