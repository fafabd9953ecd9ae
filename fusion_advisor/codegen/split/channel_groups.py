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
_OF_WARP = 512
"""Elements of the first launch that a warp takes: 16 a thread, which reads 8 at a time where they have 16 bits."""
_ENOUGH = 2 * 132
"""Programs of the first launch that keep a GPU busy."""
_TILE = 4096
_WIDEST = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strides:
    """How far an address moves from image to image, group to group, pixel to pixel, and channel to channel of a group."""

    image: int
    group: int
    pixel: int
    channel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nest:
    """How a Program's loops run over images.

    Attributes:
        program: the Program.
        of_group: channels of a group.
        has_groups: whether rows are groups of images; else they are images.
        pixel: numbers of the values that are an element's pixel.
        channel: numbers of the values that are an element's channel in its group.
    """

    program: Program
    of_group: int
    has_groups: bool
    pixel: frozenset[int]
    channel: frozenset[int]

    @property
    def images(self) -> int:
        rows = self.program.dims[:-1]
        return math.prod(rows[:-1] if self.has_groups else rows)

    @property
    def groups(self) -> int:
        return self.program.dims[-2] if self.has_groups else 1

    @property
    def channels(self) -> int:
        return self.groups * self.of_group

    @property
    def pixels(self) -> int:
        """Of an image."""
        return self.program.dims[-1] // self.of_group

    def strides(self, place: Value | Store) -> _Strides:
        """Return how an address moves; what its arguments add must be of :attr:`pixel` and :attr:`channel`."""
        *rows, last = place.strides
        group = rows.pop() if self.has_groups else 0
        steps = dict.fromkeys(("pixel", "channel"), 0)
        for arg, step in zip(place.args, place.steps, strict=True):
            steps["pixel" if arg in self.pixel else "channel"] += step
        pixel, channel = steps["pixel"] + last * self.of_group, steps["channel"] + last
        return _Strides(image=rows[0] if rows else 0, group=group, pixel=pixel, channel=channel)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """A Program that this module cuts.

    Attributes:
        nest: its loops.
        block: pixels of one program of the first launch.
        norm: the sums.
        border: numbers of the values of a row that its elements read.
    """

    nest: _Nest
    block: int
    norm: Moments
    border: tuple[int, ...]

    @property
    def program(self) -> Program:
        return self.nest.program

    @property
    def blocks(self) -> int:
        """Of an image."""
        return self.nest.pixels // self.block


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
    nest, dtype = found.nest, program.values[found.norm.total].dtype
    partial = Scratch(dtype=dtype, elements=nest.images * found.blocks * nest.channels)
    rows = nest.images * nest.groups
    scratch = (partial, partial, *(Scratch(dtype=program.values[number].dtype, elements=rows) for number in found.border))
    return Parts(parts=(_moments_part(found, scratch), _groups_part(found, scratch), _last_part(found, scratch)), scratch=scratch)


def _find(program: Program) -> _Groups | None:
    if not program.is_reduced or program.siblings or program.is_exact or math.prod(program.dims) <= TINY_ELEMENTS:
        return None
    sums, nest = moments(program), _nest(program)
    if nest is not None and not nest.has_groups and nest.images > _ENOUGH:  # whole rows, and enough of them
        return None
    if nest is None or len(sums) != 1 or sum(value.op in REDUCTIONS for value in program.values) != 2:
        return None
    block = _block(nest.pixels, nest.images * nest.channels)
    border = _border(nest, sums[0]) if block and _is_pixelwise(nest) else None
    return None if border is None else _Groups(nest=nest, block=block, norm=sums[0], border=border)


def _nest(program: Program) -> _Nest | None:
    """Return how the loops run over images, as the addresses say; None where they do not say it."""
    values, last = program.values, len(program.dims) - 1
    over: dict[str, dict[int, int]] = {"quotient": {}, "remainder": {}}
    for number, value in enumerate(values):
        if value.op in over and values[value.args[0]].op == "index" and values[value.args[0]].dim == last:
            over[value.op][number] = int(values[value.args[1]].constant or 0) if values[value.args[1]].op == "extent" else 0
    sizes = {*over["quotient"].values(), *over["remainder"].values()}
    if len(sizes) != 1 or not over["remainder"]:
        return None
    (of_group,), has_groups = sizes, bool(over["quotient"])
    if len(program.dims) - has_groups not in (1, 2) or of_group < 1 or program.dims[-1] % of_group:
        return None
    pixel, channel = (frozenset(over[name]) for name in ("quotient", "remainder"))
    return _Nest(program=program, of_group=of_group, has_groups=has_groups, pixel=pixel, channel=channel)


def _block(pixels: int, channels: int) -> int:
    """Return the pixels of a program of the first launch: as many as leave enough programs; 0 where none divide an image."""
    sizes = [size for size in range(_LEAST_PIXELS, _MOST_PIXELS + 1) if pixels % size == 0]
    enough = [size for size in sizes if pixels // size * channels >= _ENOUGH * _CHANNELS]
    return max(enough, default=min(sizes, default=0))


def _is_pixelwise(nest: _Nest) -> bool:
    """Whether every address is a pixel's and a channel's, and nothing else looks at the row's index."""
    program, divided = nest.program, nest.pixel | nest.channel
    places: list[Value | Store] = [*(value for value in program.values if value.op == "load"), *program.stores]
    for place in places:
        if place.guard is not None or not divided >= set(place.args) or (nest.has_groups and place.strides[-1]):
            return False
        strides = nest.strides(place)
        is_of_element = bool(strides.pixel or strides.channel)
        if nest.has_groups and is_of_element and strides.group != nest.of_group * strides.channel:
            return False
    inside = {arg for number in divided for arg in program.values[number].args}
    for number, value in enumerate(program.values):
        if number in divided | inside or value.op in ("load", "size", *REDUCTIONS):
            continue
        if value.op not in _PLAIN or not (inside | divided).isdisjoint(value.args):
            return False
    return all(nest.strides(store).pixel for store in program.stores)


def _border(nest: _Nest, norm: Moments) -> tuple[int, ...] | None:
    """Return a row's values that follow from its sums and that its elements read; None where rows are written, or read early."""
    program = nest.program
    by_element, by_row = set[int](), set[int]()
    for number, value in enumerate(program.values):
        if value.op in REDUCTIONS:
            by_row.add(number)
        elif _is_of_element(nest, value) or not by_element.isdisjoint(value.args):
            by_element.add(number)
        elif not by_row.isdisjoint(value.args):
            by_row.add(number)
    stored = [store.value for store in program.stores]
    own = _needed(program, norm.element)
    loads = [program.values[number] for number in own if program.values[number].op == "load"]
    is_early = any(nest.strides(value).group and not _is_of_element(nest, value) for value in loads)
    if not set(stored) <= by_element or not own.isdisjoint(by_row) or is_early:
        return None
    read = {arg for number in _needed(program, *stored) if number in by_element for arg in program.values[number].args}
    return tuple(sorted(read & by_row))


def _is_of_element(nest: _Nest, value: Value) -> bool:
    """Whether a load differs between the elements of a row."""
    if value.op != "load":
        return False
    strides = nest.strides(value)
    return bool(strides.pixel or strides.channel)


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
    """A number of elements, written out: images of other sizes take kernels of their own."""
    return copier.emit(Value(op="const", constant=float(count), dtype=dtype))


def _moments_part(found: _Groups, scratch: tuple[Scratch, ...]) -> Part:
    """Rows are (image, block of pixels, channel), columns the pixels of a block."""
    nest = found.nest
    dims = (nest.images, found.blocks, nest.channels, found.block)

    def leaf(_: Copier, number: int) -> Value | None:
        value = found.program.values[number]
        if value.op != "load":
            return None
        strides = nest.strides(value)
        return replace(
            value, args=(), steps=(), strides=(strides.image, strides.pixel * found.block, strides.channel, strides.pixel)
        )  # fmt: skip

    copier = Copier(found.program, dims, leaf)
    element = copier.copy(found.norm.element)
    dtype = copier.values[element].dtype
    total = copier.emit(Value(op="reduce_sum", args=(element,), dtype=dtype))
    size = copier.emit(Value(op="size", dim=3, dtype=dtype))
    mean = copier.emit(Value(op="div", args=(total, size), dtype=dtype))
    centred = copier.emit(Value(op="sub", args=(element, mean), dtype=dtype))
    square = copier.emit(Value(op="mul", args=(centred, centred), dtype=dtype))
    squares = copier.emit(Value(op="reduce_sum", args=(square,), dtype=dtype))
    strides = (found.blocks * nest.channels, nest.channels, 1, 0)
    stores = [Store(operand=-1 - n, value=value, strides=strides) for n, value in enumerate((mean, squares))]
    warps = min(8, max(1, _CHANNELS * found.block // _OF_WARP))
    tuning = Tuning(block_rows=_CHANNELS, num_warps=1 << (warps.bit_length() - 1))
    return copier.part(stores, scratch, tuning, "moments", is_reduced=True)


def _groups_part(found: _Groups, scratch: tuple[Scratch, ...]) -> Part:
    """Rows are (image, group), columns all channels of the group in all blocks."""
    program, nest, norm = found.program, found.nest, found.norm
    dims = (nest.images, nest.groups, found.blocks * nest.of_group)

    def partial(copier: Copier, operand: int) -> int:
        index = copier.emit(Value(op="index", dim=2, dtype="int64"))
        extent = copier.emit(Value(op="extent", constant=nest.of_group, dtype="int64"))
        block = copier.emit(Value(op="quotient", args=(index, extent), dtype="int64"))
        channel = copier.emit(Value(op="remainder", args=(index, extent), dtype="int64"))
        strides = (found.blocks * nest.channels, nest.of_group, 0)
        args, steps = (block, channel), (nest.channels, 1)
        load = Value(op="load", operand=operand, strides=strides, args=args, steps=steps, dtype=scratch[0].dtype)
        return copier.emit(load)

    def leaf(copier: Copier, number: int) -> Value | int | None:
        value = program.values[number]
        if value.op == "size":
            return _count(copier, program.dims[-1], value.dtype)
        if value.op == "load":  # of a row
            strides = nest.strides(value)
            return replace(value, strides=(strides.image, strides.group, 0))
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
    strides = (nest.groups, 1, 0)
    stores = [Store(operand=-3 - n, value=copier.copy(number), strides=strides) for n, number in enumerate(found.border)]
    return copier.part(stores, scratch, Tuning(), "groups", is_reduced=True)


def _last_part(found: _Groups, scratch: tuple[Scratch, ...]) -> Part:
    """Pointwise over (image, pixel, channel)."""
    program, nest = found.program, found.nest
    dims = (nest.images, nest.pixels, nest.channels)

    def of_row(copier: Copier, value: Value, operand: int, image: int, step: int) -> Value:
        index = copier.emit(Value(op="index", dim=2, dtype="int64"))
        extent = copier.emit(Value(op="extent", constant=nest.of_group, dtype="int64"))
        group = copier.emit(Value(op="quotient", args=(index, extent), dtype="int64"))
        offset = value.offset if operand >= 0 else 0
        return Value(
            op="load", operand=operand, strides=(image, 0, 0), args=(group,), steps=(step,), offset=offset, dtype=value.dtype
        )  # fmt: skip

    def leaf(copier: Copier, number: int) -> Value | int | None:
        value = program.values[number]
        if number in found.border:
            return of_row(copier, value, -3 - found.border.index(number), nest.groups, 1)
        if value.op == "size":
            return _count(copier, program.dims[-1], value.dtype)
        if value.op != "load":
            return None
        strides = nest.strides(value)
        if strides.group and not _is_of_element(nest, value):
            return of_row(copier, value, value.operand, strides.image, strides.group)
        return replace(value, args=(), steps=(), strides=(strides.image, strides.pixel, strides.channel))

    copier, stores = Copier(program, dims, leaf), []
    for store in program.stores:
        moved = nest.strides(store)
        own = replace(store, args=(), steps=(), strides=(moved.image, moved.pixel, moved.channel))
        stores.append(replace(own, value=copier.copy(store.value)))
    width = math.gcd(nest.channels, _WIDEST)
    width = width if width >= _CHANNELS // 2 else min(_WIDEST, 1 << (nest.channels - 1).bit_length())
    return copier.part(stores, scratch, Tuning(block_cols=width, block_rows=_TILE // width, num_warps=8), "", is_reduced=False)
