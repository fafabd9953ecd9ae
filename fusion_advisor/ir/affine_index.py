"""Where an element lies: one :class:`Place` per dim of a value, affine in the loop variables, and what a reshape does to it.

A view never moves data here. It takes the places of its result and gives those of its source; only a reshape that cuts a dim in
two at a point where no loop begins needs more: it asks for the loop to be cut there (:class:`CutLoop`) and the chain is lowered
again with the finer nest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fusion_advisor.ir.dtypes import CannotLower


@dataclass(frozen=True, slots=True)
class Place:
    """A position along one dim: Σ step · loop variable + Σ step · gathered value + shift.

    Attributes:
        terms: (loop variable, step) pairs, by variable.
        shift: constant part.
        gathered: (number of an int64 value of the kernel, step) pairs: a position that is read or computed, not looped over.
    """

    terms: tuple[tuple[int, int], ...] = ()
    shift: int = 0
    gathered: tuple[tuple[int, int], ...] = ()

    @property
    def is_fixed(self) -> bool:
        """Whether it is a number that is known now."""
        return not self.terms and not self.gathered

    @property
    def variable(self) -> int | None:
        """The loop variable that it is, moved by a constant at most; None for anything else."""
        if len(self.terms) != 1 or self.gathered or self.terms[0][1] != 1:
            return None
        return self.terms[0][0]

    def moved(self, shift: int) -> Place:
        """The place ``shift`` further on."""
        return Place(self.terms, self.shift + shift, self.gathered)

    def scaled(self, factor: int) -> Place:
        """The place times a number."""
        return Place(
            tuple((variable, step * factor) for variable, step in self.terms),
            self.shift * factor,
            tuple((value, step * factor) for value, step in self.gathered),
        )

    def plus(self, other: Place) -> Place:
        """The sum of two places."""
        return Place(_summed(self.terms, other.terms), self.shift + other.shift, _summed(self.gathered, other.gathered))


Index = tuple[Place, ...]
"""One place per dim of a value."""

ORIGIN = Place()


class CutLoop(Exception):
    """A loop has to be cut in two before a chain can be lowered.

    Attributes:
        variable: the loop.
        inner: size of the inner part.
    """

    def __init__(self, variable: int, inner: int) -> None:
        super().__init__(variable, inner)
        self.variable = variable
        self.inner = inner


def loop(variable: int) -> Place:
    """The place that is a loop variable."""
    return Place(((variable, 1),))


def fixed(position: int) -> Place:
    """A place known now."""
    return Place((), position)


def reshaped(where: Index, shape: Sequence[int], source: Sequence[int], extents: Sequence[int]) -> Index:
    """Return the index into a value of shape ``source`` for an index into its reshape to ``shape``.

    Args:
        where: index into the reshaped value.
        shape: the shape that ``where`` indexes.
        source: shape before; the same number of elements.
        extents: size of every loop.

    Raises:
        CutLoop: a loop must be cut first.
        CannotLower: no cut helps.
    """
    found: list[Place] = []
    for after, before in _groups(shape, source):
        places = [where[dim] for dim in after]
        sizes = [source[dim] for dim in before]
        wide = [dim for dim in after if shape[dim] != 1]
        if sum(size != 1 for size in sizes) <= 1 and len(wide) <= 1:
            place = where[wide[0]] if wide else ORIGIN
            found += [ORIGIN if size == 1 else place for size in sizes]
            continue
        flat, step = ORIGIN, 1
        for dim, place in zip(reversed(after), reversed(places), strict=True):
            if shape[dim] != 1:
                flat = flat.plus(place.scaled(step))
            step *= shape[dim]
        found += _digits(flat, sizes, extents, shape, source)
    return tuple(found)


def undivided(where: Index, shape: Sequence[int], source: Sequence[int]) -> tuple[Index, tuple[tuple[int, ...], ...]]:
    """As :func:`reshaped`, with every dim that the reshape made of several left whole: its place is that of the last of them.

    The place then passes the end of that dim, which is right for whoever uses it times a stride, and only where the strides of
    the dims before are those of dense memory.

    Args:
        where: index into the reshaped value.
        shape: the shape that ``where`` indexes.
        source: shape before; the same number of elements.

    Returns:
        The index, and the dims of each run that was left whole.

    Raises:
        CannotLower: the reshape does more than merge dims.
    """
    found: list[Place] = []
    runs = []
    for after, before in _groups(shape, source):
        places, wide = [where[dim] for dim in after if shape[dim] != 1], tuple(dim for dim in before if source[dim] != 1)
        if len(places) > 1:
            raise CannotLower("FA603", f"a reshape from {tuple(source)} to {tuple(shape)} cannot be folded into an address")
        place = places[0] if places else ORIGIN
        found += [place if wide and dim == wide[-1] else ORIGIN for dim in before]
        runs += [wide] * (len(wide) > 1)
    return tuple(found), tuple(runs)


def _groups(shape: Sequence[int], source: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of dims that hold the same number of elements on both sides."""
    groups: list[tuple[list[int], list[int]]] = []
    left, right = 0, 0
    while left < len(shape) or right < len(source):
        after, before = [], []
        if left < len(shape):
            after, left = [left], left + 1
        if right < len(source):
            before, right = [right], right + 1
        have, want = math.prod(shape[dim] for dim in after), math.prod(source[dim] for dim in before)
        while have != want:
            if have < want and left < len(shape):
                have, after, left = have * shape[left], [*after, left], left + 1
            elif want < have and right < len(source):
                want, before, right = want * source[right], [*before, right], right + 1
            else:
                raise CannotLower("FA603", f"a reshape from {tuple(source)} to {tuple(shape)} cannot be folded into an address")
        groups.append((after, before))
    return groups


def _digits(
    flat: Place, sizes: Sequence[int], extents: Sequence[int], shape: Sequence[int], source: Sequence[int]
) -> list[Place]:
    """Split a flat position into one place per size, each term going to the one digit that it stays in."""
    refusal = CannotLower("FA603", f"a reshape from {tuple(source)} to {tuple(shape)} cannot be folded into an address")
    if flat.gathered or flat.shift < 0:
        raise refusal
    weights = [math.prod(sizes[digit + 1 :]) for digit in range(len(sizes))]
    places = [fixed(flat.shift // weight % size) for weight, size in zip(weights, sizes, strict=True)]
    for variable, step in flat.terms:
        if extents[variable] == 1:
            continue
        digit = next((n for n, weight in enumerate(weights) if sizes[n] != 1 and weight <= step), len(sizes) - 1)
        weight = weights[digit]
        if step % weight:
            raise refusal
        if step * (extents[variable] - 1) >= weight * sizes[digit]:
            inner, rest = divmod(weight * sizes[digit], step)
            if rest or extents[variable] % inner or inner in (0, 1, extents[variable]):
                raise refusal
            raise CutLoop(variable, inner)
        places[digit] = places[digit].plus(Place(((variable, step // weight),)))
    for place, size in zip(places, sizes, strict=True):
        if place.shift + sum(step * (extents[variable] - 1) for variable, step in place.terms) >= size:
            raise refusal
    return places


def _summed(left: tuple[tuple[int, int], ...], right: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    total = dict(left)
    for key, step in right:
        total[key] = total.get(key, 0) + step
    return tuple(sorted((key, step) for key, step in total.items() if step))
