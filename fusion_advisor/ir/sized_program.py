"""A program whose numbers are functions of the sizes that vary: one kernel's arguments for every batch and length.

Extents, strides, steps and offsets are arguments of a rendered kernel. Lowered at sizes of a grid, the program has the same
structure (:func:`~fusion_advisor.ir.program.layout_key`) at each, and every number in it is a polynomial in the sizes. Sizes off
the grid prove them. To bind the kernel at new sizes then takes no lowering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fusion_advisor.ir.polynomial import Polynomial, grid, through
from fusion_advisor.ir.program import Part, Program, Store, Value, layout_key

Point = tuple[int, ...]
"""Sizes, in the order of their names."""


class NoOneProgram(Exception):
    """A chain whose program is another one at some sizes; the text says at which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedProgram:
    """A program at any sizes.

    Attributes:
        example: the program at one point; its operands' element counts are of that point alone.
        numbers: every number of it that may vary, in the order of :func:`_numbers`.
    """

    example: Program
    numbers: tuple[Polynomial, ...]

    def at(self, point: Point) -> Program:
        """Return the program at other sizes.

        Raises:
            NoOneProgram: its structure is another one there.
        """
        try:
            found = _with_numbers(self.example, [one.at(point) for one in self.numbers])
        except ValueError as error:
            raise NoOneProgram(f"at {point} {error}") from error
        if layout_key(found) != layout_key(self.example):
            raise NoOneProgram(f"at {point} its strides are of another kind")
        return found

    def open_dims(self) -> frozenset[int]:
        """Return the loops of the first nest whose extents vary."""
        return frozenset(n for n in range(len(self.example.dims)) if not self.numbers[n].is_constant)


def fit(values: Sequence[Sequence[int]], off_grid: Sequence[Point], program_at: Callable[[Point], Program]) -> SizedProgram:
    """Find the polynomials of a program's numbers.

    Args:
        values: of each size on the grid.
        off_grid: points that must be met too.
        program_at: lowers the chain at a point.

    Raises:
        NoOneProgram: the structure differs between points, or a number is no such polynomial.
    """
    programs = {point: program_at(point) for point in [*grid(values), *off_grid]}
    first = next(iter(programs))
    example = programs[first]
    key, constants = layout_key(example), _fixed(example)
    for point, program in programs.items():
        if layout_key(program) != key:
            raise NoOneProgram(f"its loops at {point} are others than at {first}")
        if _fixed(program) != constants:
            raise NoOneProgram(f"a constant of it at {point} is another one than at {first}")
    numbers = {point: list(_numbers(program)) for point, program in programs.items()}
    found = tuple(
        through(values, {point: numbers[point][place] for point in grid(values)}) for place in range(len(numbers[first]))
    )
    for point in off_grid:
        for polynomial, number in zip(found, numbers[point], strict=True):
            try:
                met = polynomial.at(point)
            except ValueError:
                met = None
            if met != number:
                raise NoOneProgram(f"an extent or a stride of it is no polynomial in the sizes: {number} at {point}, not {met}")
    return SizedProgram(example=example, numbers=found)


def _numbers(program: Program) -> Iterator[int]:
    """Yield what a kernel takes as integer arguments."""
    yield from program.dims
    for value in program.values:
        yield from (*value.strides, *value.steps, value.offset)
        if value.op == "extent":
            yield int(value.constant or 0)
    for store in program.stores:
        yield from (*store.strides, *store.steps, store.offset)
    for part in program.siblings:
        yield from _numbers(part.program)


def _fixed(program: Program) -> tuple[object, ...]:
    """Return the constants that stand in a kernel's source."""
    own = tuple((value.op, value.constant) for value in program.values if value.op != "extent")
    return (*own, *(one for part in program.siblings for one in _fixed(part.program)))


def _with_numbers(program: Program, numbers: Sequence[int]) -> Program:
    taken = iter(numbers)
    found = _filled(program, taken)
    assert next(taken, None) is None
    return found


def _filled(program: Program, numbers: Iterator[int]) -> Program:
    def take(count: int) -> tuple[int, ...]:
        return tuple(next(numbers) for _ in range(count))

    dims = take(len(program.dims))
    values: list[Value] = []
    for value in program.values:
        strides, steps, offset = take(len(value.strides)), take(len(value.steps)), next(numbers)
        constant = next(numbers) if value.op == "extent" else value.constant
        values.append(replace(value, strides=strides, steps=steps, offset=offset, constant=constant))
    stores: list[Store] = []
    for store in program.stores:
        strides, steps, offset = take(len(store.strides)), take(len(store.steps)), next(numbers)
        stores.append(replace(store, strides=strides, steps=steps, offset=offset))
    siblings = tuple(Part(program=_filled(part.program, numbers), operands=part.operands) for part in program.siblings)
    return replace(program, dims=dims, values=tuple(values), stores=tuple(stores), siblings=siblings)


def points_for(ranges: Mapping[str, tuple[int, int]]) -> tuple[list[list[int]], list[Point]]:
    """Return a grid of sizes inside ranges, and points off it.

    Primes, where there are some: a length that happens to be a number of heads, or divides another size, would be lowered to a
    special case.

    Args:
        ranges: by name the least and the most, in the order of the names.
    """
    taken: set[int] = set()
    values: list[list[int]] = []
    for least, most in ranges.values():
        free = [one for one in _PRIMES if least <= one <= most and one not in taken]
        free += [one for one in range(least, min(most, least + 8) + 1) if one not in taken and one not in free]
        mine = sorted(free[: min(3, most - least + 1)]) or [least]
        taken.update(mine)
        values.append(mine)
    off = []
    for step in (0, 1, 2):
        point = []
        for (least, most), mine in zip(ranges.values(), values, strict=True):
            more = [one for one in (*_PRIMES, most, least) if least <= one <= most and one not in mine]
            point.append(more[step % len(more)] if more else mine[step % len(mine)])
        off.append(tuple(point))
    return values, list(dict.fromkeys(off))


_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 5, 7)
