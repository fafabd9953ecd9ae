"""The tensors of a kernel's site: what a launcher allocates, fills and checks.

All of it comes from the Program, and from the shapes of the site's tensors where the caller knows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion_advisor.codegen.common.arguments import pointer_names
from fusion_advisor.ir.program import Program, Store, Value, nests

_SMALL = 10
"""Integers that are no positions are drawn below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Shape and strides of a tensor, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def reach(self) -> int:
        """Elements from the first address to the last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTensor:
    """A tensor that the kernel is called with.

    Attributes:
        name: an identifier in Python and in C++.
        dtype: torch's name.
        is_output: whether the kernel writes it.
        element_count: elements from the first address to the last.
        below: integers are drawn from 0 to below - 1: of positions, the extent of the tensor that they point into.
        layout: the site's shape and strides; None where they are not known, or where a kernel reads past them.
    """

    name: str
    dtype: str
    is_output: bool
    element_count: int
    below: int
    layout: Layout | None


def tensors_of(program: Program, layouts: Sequence[Layout | None] = ()) -> tuple[SiteTensor, ...]:
    """Describe the tensors of a launch.

    Args:
        program: what the kernel computes.
        layouts: shape and strides of each operand at the site, in the order of the operands; none by default.
    """
    counts, limits = [0] * len(program.operands), [0] * len(program.operands)
    for part in nests(program):
        below = _limits(part.program)
        reach = _reach(part.program, below)
        for own, position in enumerate(part.operands):
            counts[position] = max(counts[position], reach[own])
            if own in below:
                limits[position] = min(limits[position] or below[own], below[own])
    names = [name.removesuffix("_ptr") for name in pointer_names(program)]
    given = list(layouts) or [None] * len(names)
    found = []
    for operand, name, count, limit, layout in zip(program.operands, names, counts, limits, given, strict=True):
        fits = layout is not None and layout.reach >= count and all(stride >= 0 for stride in layout.strides)
        found.append(
            SiteTensor(
                name=name,
                dtype=operand.dtype,
                is_output=operand.is_output,
                below=limit or _SMALL,
                element_count=layout.reach if fits and layout else count,
                layout=layout if fits else None,
            )
        )
    return tuple(found)


def is_empty(program: Program) -> bool:
    """Whether a loop nest writes nothing."""
    return 0 in program.dims[:-1] or (0 in program.dims and not program.is_reduced)


def _limits(program: Program) -> dict[int, int]:
    """For each operand that positions are read from, the extent of the tensor that they point into."""
    found: dict[int, int] = {}
    for value in program.values:
        if value.op == "inside":
            extent = int(program.values[value.args[1]].constant or 0)
            for number in _closure(program.values, value.args[0]):
                load = program.values[number]
                if load.op == "load" and program.operands[load.operand].dtype.startswith(("int", "uint")):
                    fits = _fitting(program, value.args[0], extent, load.operand)
                    found[load.operand] = min(found.get(load.operand, fits), fits)
    return found


def _fitting(program: Program, position: int, extent: int, operand: int) -> int:
    """Where a position is computed of an operand: the limit, halved down from the extent, below which it stays inside.

    RoBERTa's positions are ``cumsum * mask + 1``. A negative position that is wrapped around has no such limit: its largest value
    is counted too high here, and its operand keeps the extent.
    """
    below = extent
    while below > 1 and _most(program, position, {operand: below}, is_checked=False) >= extent:
        below //= 2
    return below if below > 1 else extent


def _closure(values: Sequence[Value], number: int) -> set[int]:
    """The numbers of all values that a value is computed from, its own too; a load's address and guards are not followed."""
    found, waiting = {number}, [number]
    while waiting:
        value = values[waiting.pop()]
        for arg in () if value.op == "load" else value.args:
            if arg not in found:
                found.add(arg)
                waiting.append(arg)
    return found


def _reach(program: Program, below: dict[int, int]) -> list[int]:
    """How far the addresses of each operand reach, in elements. A guarded read stays inside what the others read."""
    found = [0] * len(program.operands)
    loads = [v for v in program.values if v.op == "load"]
    is_read_whole = {value.operand for value in loads if value.guard is None}
    accesses: list[Value | Store] = [v for v in loads if v.guard is None or v.args or v.operand not in is_read_whole]
    for access in [*accesses, *program.stores]:
        walked = [(size, stride) for size, stride in zip(program.dims, access.strides, strict=True) if stride]
        if any(size == 0 for size, _ in walked):
            continue
        last = access.offset + sum((size - 1) * max(stride, 0) for size, stride in walked)
        last += sum(step * _most(program, arg, below) for arg, step in zip(access.args, access.steps, strict=True))
        found[access.operand] = max(found[access.operand], last + 1)
    return found


def _most(program: Program, number: int, below: dict[int, int], *, is_checked: bool = True) -> int:
    """The largest number that a position takes; where a kernel checks it, one below the extent."""
    extents = [
        int(program.values[value.args[1]].constant or 0)
        for value in program.values
        if is_checked and value.op == "inside" and number in _closure(program.values, value.args[0])
    ]
    if extents:
        return min(extents) - 1
    value = program.values[number]
    args = [_most(program, arg, below, is_checked=is_checked) for arg in value.args]
    if value.op == "index":
        return max(program.dims[value.dim] - 1, 0)
    if value.op in ("const", "extent"):
        return int(value.constant or 0)
    if value.op == "load":
        return below.get(value.operand, _SMALL) - 1
    if value.op == "quotient":
        return args[0] // max(args[1], 1)
    if value.op == "mul":
        return args[0] * args[1]
    if value.op == "sub":
        return args[0]
    return sum(args) if value.op == "add" else max(args, default=0)
