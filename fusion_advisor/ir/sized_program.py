"""A program whose numbers are functions of the sizes that vary: one kernel's arguments for every batch and length.

Extents, strides, steps and offsets are arguments of a rendered kernel. A chain is lowered once with sizes that remember how they
were computed (:mod:`fusion_advisor.ir.sized_int`); lowered at other sizes with plain numbers it must give the same structure
(:func:`~fusion_advisor.ir.program.layout_key`) and the numbers that the forms say. To bind the kernel then takes no lowering.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fusion_advisor.ir.program import Part, Program, Store, Value, layout_key
from fusion_advisor.ir.sized_int import Form, compiled, form_of, places_in

Leaves = Sequence[int]
"""The value of each size of the graph that forms refer to."""


class NoOneProgram(Exception):
    """A chain whose program is another one at some sizes; the text says at which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedProgram:
    """A program at any sizes.

    Attributes:
        example: the program at one point, in plain numbers; its operands' element counts are of that point alone.
        forms: of every integer argument, in the order of :func:`_numbers`.
    """

    example: Program
    forms: tuple[Form, ...]
    layout: str
    """:func:`~fusion_advisor.ir.program.layout_key` of the example."""

    @property
    def places(self) -> set[int]:
        """Places of the sizes that its integer arguments are computed from."""
        return set().union(*map(places_in, self.forms))

    def at(self, leaves: Leaves) -> Program:
        """Return the program at other sizes.

        Raises:
            NoOneProgram: its strides are of another kind there.
        """
        found = _with_numbers(self.example, _compiled(self.forms)(leaves))
        if layout_key(found) != self.layout:
            raise NoOneProgram("its strides are of another kind")
        return found


@functools.lru_cache(maxsize=512)
def _compiled(forms: tuple[Form, ...]) -> Callable[[Leaves], tuple[int, ...]]:
    return compiled(forms)


def sized_program(tracked: Program) -> SizedProgram:
    """Return a program that was lowered with sizes that remember their forms."""
    numbers = list(_numbers(tracked))
    example = _plain(_with_numbers(tracked, [int(one) for one in numbers]))
    return SizedProgram(example=example, forms=tuple(map(form_of, numbers)), layout=layout_key(example))


def require_same(found: SizedProgram, lowered: Program, leaves: Leaves, where: str) -> None:
    """Compare what the forms say of some sizes with what lowering gives there.

    Args:
        found: from :func:`sized_program`.
        lowered: the chain lowered at those sizes.
        leaves: those sizes.
        where: the sizes in words.

    Raises:
        NoOneProgram: the structure, a constant or a number differs.
    """
    if layout_key(lowered) != found.layout:
        raise NoOneProgram(f"its loops at {where} are others than elsewhere")
    if _fixed(lowered) != _fixed(found.example):
        raise NoOneProgram(f"a constant of it at {where} is another one than elsewhere")
    numbers = list(_numbers(lowered))
    said = list(_numbers(found.at(leaves)))
    if said != numbers:
        differing = next((one, other) for one, other in zip(said, numbers, strict=True) if one != other)
        raise NoOneProgram(f"an extent or a stride of it at {where} is {differing[1]}, and {differing[0]} was computed")


def _plain(program: Program) -> Program:
    """Return a program whose element counts are plain numbers."""
    operands = tuple(replace(operand, element_count=int(operand.element_count)) for operand in program.operands)
    siblings = tuple(Part(program=_plain(part.program), operands=part.operands) for part in program.siblings)
    return replace(program, operands=operands, siblings=siblings)


def _numbers(program: Program) -> Iterator[int]:
    """Yield what a kernel takes as integer arguments."""
    yield from program.dims
    for value in program.values:
        yield from (*value.strides, *value.steps, value.offset)
        if value.op == "extent":
            assert isinstance(value.constant, int)
            yield value.constant
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
        is_other = value.op == "extent" or strides or steps or offset != value.offset or type(offset) is not type(value.offset)
        values.append(replace(value, strides=strides, steps=steps, offset=offset, constant=constant) if is_other else value)
    stores: list[Store] = []
    for store in program.stores:
        strides, steps, offset = take(len(store.strides)), take(len(store.steps)), next(numbers)
        stores.append(replace(store, strides=strides, steps=steps, offset=offset))
    siblings = tuple(Part(program=_filled(part.program, numbers), operands=part.operands) for part in program.siblings)
    return replace(program, dims=dims, values=tuple(values), stores=tuple(stores), siblings=siblings)


def points_for(ranges: Mapping[str, tuple[int, int]], count: int = 6) -> list[dict[str, int]]:
    """Return sizes inside ranges: the first to lower at, the others to compare with.

    Primes, where there are some: a length that happens to be a number of heads, or divides another size, would be lowered to a
    special case. A range with one prime or none has other sizes too: at a single size a constant that varies is not seen. 1 only
    where there is nothing else: a dim of one element has no loop.

    Args:
        ranges: by name the least and the most.
        count: points at most.
    """
    found: list[dict[str, int]] = []
    for step in range(count):
        point: dict[str, int] = {}
        for place, (name, (least, most)) in enumerate(ranges.items()):
            free = [one for one in _PRIMES if least <= one <= most and one not in point.values()]
            larger = range(most, max(least, 2) - 1, -1)
            others = [one for one in larger if one not in point.values() and one not in free]
            more = (free if len(free) > 1 else [*free, *others[:_FEW]]) or list(larger) or [least]
            # A stride that divides how many there are would take the same size at every step, and find nothing that varies.
            stride = next(one for one in range(place + 1, place + len(more) + 2) if math.gcd(one, len(more)) == 1)
            point[name] = more[(step * stride + 2 * place) % len(more)]
        if point not in found:
            found.append(point)
    for name, (least, most) in ranges.items():  # what is left differs from another dim at one size alone
        size = found[0][name]
        others = [one for one in range(most, max(least, 2) - 1, -1) if one != size]
        if others and all(point[name] == size for point in found):
            found.append({**found[0], name: others[0]})
    return found


_FEW = 2
"""Of sizes that are no primes: at each one more may come out as a special case."""
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131,
           5, 7, 3, 2)  # fmt: skip
