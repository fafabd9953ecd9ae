"""Norms over groups of channels of images in channels last, as three launches that read memory side by side.

A group's row is many short runs, one for each pixel: 4 channels of 128, 8 bytes of 256. One program for each row reads a part of
every cache line, and an image has 32 rows where a GPU runs 132 programs at a time. So the rows are cut:

1. ``moments``: for each channel of a block of pixels its sum and its squares about its own mean. Programs read whole lines.
2. ``groups``: a group's mean and variance of its channels' (Chan, Golub and LeVeque, 1979), and what follows from them.
3. the kernel itself: what the norm does to each element, pixel by pixel, and the ops around it.

What is computed before the norm (a residual added, say) is computed twice, in 1 and in 3. Figures:
``docs/measurements/channels_last.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fusion_advisor.codegen.common.welford import Moments, moments
from fusion_advisor.codegen.split.parts import Copier, Part, Parts, Scratch
from fusion_advisor.ir.program import ARITHMETIC, COMPARES, LOGIC, REDUCTIONS, TINY_ELEMENTS, Program, Store, Value
from fusion_advisor.records import Tuning

_PLAIN = frozenset({*ARITHMETIC, *COMPARES, *LOGIC, "not", "isnan", "where", "cast", "const"})
_MOST_PIXELS, _LEAST_PIXELS = 128, 8
"""Of one program of the first launch."""
_CHANNELS = 64
"""Of one program of the first launch: 128 bytes of 16-bit numbers, a cache line."""
_ENOUGH = 2 * 132
"""Programs of the first launch that keep a GPU busy."""
_TILE = 4096
_WIDEST = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """A Program that this module cuts.

    Attributes:
        program: the Program.
        of_group: channels of a group.
        pixels: of an image.
        block: pixels of one program of the first launch.
        pixel: numbers of the values that are an element's pixel.
        member: numbers of the values that are an element's channel in its group.
        norm: the sums.
        border: numbers of the values of a row that its elements read.
    """

    program: Program
    of_group: int
    pixels: int
    block: int
    pixel: frozenset[int]
    member: frozenset[int]
    norm: Moments
    border: tuple[int, ...]

    @property
    def images(self) -> int:
        return math.prod(self.program.dims[:-2])

    @property
    def groups(self) -> int:
        return self.program.dims[-2]

    @property
    def channels(self) -> int:
        return self.groups * self.of_group

    @property
    def blocks(self) -> int:
        """Of an image."""
        return self.pixels // self.block


def split_groups(program: Program) -> Parts | None:
    """Cut a norm over groups of channels, in channels last, into three launches.

    Args:
        program: any.

    Returns:
        None where the Program is no such norm, or so small that launches cost more than they gain.
    """
    found = _find(program)
    if found is None:
        return None
    dtype = program.values[found.norm.total].dtype
    partial = Scratch(dtype=dtype, elements=found.images * found.blocks * found.channels)
    of_rows = [
        Scratch(dtype=program.values[number].dtype, elements=found.images * found.groups) for number in found.border
    ]  # fmt: skip
    scratch = (partial, partial, *of_rows)
    return Parts(parts=(_moments_part(found, scratch), _groups_part(found, scratch), _last_part(found, scratch)), scratch=scratch)


def _find(program: Program) -> _Groups | None:
    if not program.is_reduced or program.siblings or program.is_exact or len(program.dims) not in (2, 3):
        return None
    if math.prod(program.dims) <= TINY_ELEMENTS:
        return None
    of_group = _channels_of_group(program)
    sums = moments(program)
    if not of_group or program.dims[-1] % of_group or len(sums) != 1:
        return None
    if sum(value.op in REDUCTIONS for value in program.values) != 2:
        return None
    pixel, member = _places(program, of_group)
    pixels = program.dims[-1] // of_group
    block = _block(pixels, math.prod(program.dims[:-1]) * of_group)
    if not block or not _is_pixelwise(program, of_group, pixel, member):
        return None
    norm = sums[0]
    border = _border(program, pixel | member, norm)
    if border is None:
        return None
    return _Groups(
        program=program, of_group=of_group, pixels=pixels, block=block, pixel=pixel, member=member, norm=norm, border=border
    )  # fmt: skip


def _channels_of_group(program: Program) -> int:
    """Return by what the row's index is divided to give the pixel of an element; 0 where nothing says so."""
    values = program.values
    for value in values:
        if value.op == "load" and len(value.args) == 2:
            over, rest = (values[arg] for arg in value.args)
            if over.op == "quotient" and rest.op == "remainder" and values[over.args[1]] == values[rest.args[1]]:
                return int(values[over.args[1]].constant or 0)
    return 0


def _places(program: Program, of_group: int) -> tuple[frozenset[int], frozenset[int]]:
    """Numbers of the values that are an element's pixel, and its channel in its group."""
    values, last = program.values, len(program.dims) - 1
    found: dict[str, set[int]] = {"quotient": set(), "remainder": set()}
    for number, value in enumerate(values):
        if value.op in found and values[value.args[0]].op == "index" and values[value.args[0]].dim == last:
            extent = values[value.args[1]]
            if extent.op == "extent" and extent.constant == of_group:
                found[value.op].add(number)
    return frozenset(found["quotient"]), frozenset(found["remainder"])


def _block(pixels: int, channels: int) -> int:
    """Return the pixels of a program of the first launch: as many as leave enough programs; 0 where none divide an image."""
    sizes = [size for size in range(_LEAST_PIXELS, _MOST_PIXELS + 1) if pixels % size == 0]
    enough = [size for size in sizes if pixels // size * channels >= _ENOUGH * _CHANNELS]
    return max(enough, default=min(sizes, default=0))


def _is_pixelwise(program: Program, of_group: int, pixel: frozenset[int], member: frozenset[int]) -> bool:
    """Whether every address is a pixel's and a channel's, and nothing else looks at the row's index."""
    places: list[Value | Store] = [*(value for value in program.values if value.op == "load"), *program.stores]
    for place in places:
        if place.guard is not None or place.strides[-1] or not pixel | member >= set(place.args):
            return False
        steps = _steps(place, pixel), _steps(place, member)
        if place.args and place.strides[-2] != of_group * steps[1]:
            return False
    inside = {arg for number in pixel | member for arg in program.values[number].args}
    for number, value in enumerate(program.values):
        if number in pixel | member or number in inside or value.op in ("load", "size", *REDUCTIONS):
            continue
        if value.op not in _PLAIN or not inside.isdisjoint(value.args) or not (pixel | member).isdisjoint(value.args):
            return False
    return all(store.args for store in program.stores)


def _steps(place: Value | Store, numbers: frozenset[int]) -> int:
    """How far an address moves for each unit of some values that are equal."""
    return sum(step for arg, step in zip(place.args, place.steps, strict=True) if arg in numbers)


def _border(program: Program, places: frozenset[int], norm: Moments) -> tuple[int, ...] | None:
    """Return a row's values that follow from its sums and that its elements read; None where rows are written, or read early."""
    by_element, by_row = set(places), set[int]()
    for number, value in enumerate(program.values):
        if value.op in REDUCTIONS:
            by_row.add(number)
        elif not by_element.isdisjoint(value.args):
            by_element.add(number)
        elif not by_row.isdisjoint(value.args):
            by_row.add(number)
    stored = [store.value for store in program.stores]
    if not set(stored) <= by_element:
        return None
    own = _needed(program, norm.element)
    loads = [program.values[number] for number in own if program.values[number].op == "load"]
    if not own.isdisjoint(by_row) or any(value.strides[-2] and not value.args for value in loads):
        return None
    read = {arg for number in _needed(program, *stored) if number in by_element for arg in program.values[number].args}
    return tuple(sorted(read & by_row))


def _needed(program: Program, *numbers: int) -> set[int]:
    """All values that some are made of, themselves included; a reduction is not looked into."""
    found: set[int] = set()
    waiting = list(numbers)
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            value = program.values[number]
            waiting += () if value.op in REDUCTIONS else value.args
    return found


def _count(copier: Copier, count: int, dtype: str) -> int:
    """A number of elements, an argument of the kernel."""
    extent = copier.emit(Value(op="extent", constant=count, dtype="int64"))
    return copier.emit(Value(op="cast", args=(extent,), dtype=dtype))


def _moments_part(found: _Groups, scratch: tuple[Scratch, ...]) -> Part:
    """Rows are (image, block of pixels, channel), columns the pixels of a block."""
    dims = (found.images, found.blocks, found.channels, found.block)

    def leaf(_: Copier, number: int) -> Value | None:
        value = found.program.values[number]
        if value.op != "load":
            return None
        image, pixel, channel = _moved(found, value)
        return replace(value, args=(), steps=(), strides=(image, pixel * found.block, channel, pixel))

    copier = Copier(found.program, dims, leaf)
    element = copier.copy(found.norm.element)
    dtype = copier.values[element].dtype
    total = copier.emit(Value(op="reduce_sum", args=(element,), dtype=dtype))
    size = copier.emit(Value(op="size", dim=3, dtype=dtype))
    mean = copier.emit(Value(op="div", args=(total, size), dtype=dtype))
    centred = copier.emit(Value(op="sub", args=(element, mean), dtype=dtype))
    square = copier.emit(Value(op="mul", args=(centred, centred), dtype=dtype))
    squares = copier.emit(Value(op="reduce_sum", args=(square,), dtype=dtype))
    strides = (found.blocks * found.channels, found.channels, 1, 0)
    stores = [Store(operand=-1 - n, value=value, strides=strides) for n, value in enumerate((mean, squares))]
    tuning = Tuning(block_rows=_CHANNELS, num_warps=8)
    return copier.part(stores, scratch, tuning, "moments", is_reduced=True)


def _groups_part(found: _Groups, scratch: tuple[Scratch, ...]) -> Part:
    """Rows are (image, group), columns all channels of the group in all blocks."""
    program, norm = found.program, found.norm
    dims = (found.images, found.groups, found.blocks * found.of_group)

    def partial(copier: Copier, operand: int) -> int:
        index = copier.emit(Value(op="index", dim=2, dtype="int64"))
        extent = copier.emit(Value(op="extent", constant=found.of_group, dtype="int64"))
        block = copier.emit(Value(op="quotient", args=(index, extent), dtype="int64"))
        member = copier.emit(Value(op="remainder", args=(index, extent), dtype="int64"))
        strides = (found.blocks * found.channels, found.of_group, 0)
        return copier.emit(
            Value(op="load", operand=operand, strides=strides, args=(block, member), steps=(found.channels, 1),
                  dtype=scratch[0].dtype)
        )  # fmt: skip

    def leaf(copier: Copier, number: int) -> Value | int | None:
        value = program.values[number]
        if value.op == "size":
            return _count(copier, program.dims[-1], value.dtype)
        if value.op == "load":  # of a row
            return replace(value, strides=(_image(found, value), value.strides[-2], 0))
        if number == norm.total:
            means = copier.emit(Value(op="reduce_sum", args=(partial(copier, -1),), dtype=value.dtype))
            return Value(op="mul", args=(means, _count(copier, found.block, value.dtype)), dtype=value.dtype)
        if number == norm.squares:
            mean = copier.copy(norm.mean)
            apart = copier.emit(Value(op="sub", args=(partial(copier, -1), mean), dtype=value.dtype))
            square = copier.emit(Value(op="mul", args=(apart, apart), dtype=value.dtype))
            many = copier.emit(Value(op="mul", args=(square, _count(copier, found.block, value.dtype)), dtype=value.dtype))
            both = copier.emit(Value(op="add", args=(partial(copier, -2), many), dtype=value.dtype))
            return Value(op="reduce_sum", args=(both,), dtype=value.dtype)
        return None

    copier = Copier(program, dims, leaf)
    stores = [
        Store(operand=-3 - n, value=copier.copy(number), strides=(found.groups, 1, 0)) for n, number in enumerate(found.border)
    ]
    return copier.part(stores, scratch, Tuning(), "groups", is_reduced=True)


def _last_part(found: _Groups, scratch: tuple[Scratch, ...]) -> Part:
    """Pointwise over (image, pixel, channel)."""
    program = found.program
    dims = (found.images, found.pixels, found.channels)

    def leaf(copier: Copier, number: int) -> Value | int | None:
        value = program.values[number]
        if number in found.border or (value.op == "load" and not value.args and any(value.strides)):
            operand = -3 - found.border.index(number) if number in found.border else value.operand
            image, step = (found.groups, 1) if number in found.border else (_image(found, value), value.strides[-2])
            index = copier.emit(Value(op="index", dim=2, dtype="int64"))
            extent = copier.emit(Value(op="extent", constant=found.of_group, dtype="int64"))
            group = copier.emit(Value(op="quotient", args=(index, extent), dtype="int64"))
            return Value(
                op="load", operand=operand, strides=(image, 0, 0), args=(group,), steps=(step,), offset=value.offset,
                dtype=value.dtype,
            )  # fmt: skip
        if value.op == "load":
            return replace(value, args=(), steps=(), strides=_moved(found, value))
        return _count(copier, program.dims[-1], value.dtype) if value.op == "size" else None

    copier = Copier(program, dims, leaf)
    stores = [
        replace(store, value=copier.copy(store.value), args=(), steps=(), strides=_moved(found, store))
        for store in program.stores
    ]
    width = math.gcd(found.channels, _WIDEST)
    width = width if width >= _CHANNELS // 2 else min(_WIDEST, 1 << (found.channels - 1).bit_length())
    return copier.part(stores, scratch, Tuning(block_cols=width, block_rows=_TILE // width, num_warps=8), "", is_reduced=False)


def _image(found: _Groups, place: Value | Store) -> int:
    """Stride from image to image."""
    return place.strides[0] if len(found.program.dims) == 3 else 0


def _moved(found: _Groups, place: Value | Store) -> tuple[int, int, int]:
    """Strides from image to image, from pixel to pixel and from channel to channel."""
    return _image(found, place), _steps(place, found.pixel), _steps(place, found.member)
