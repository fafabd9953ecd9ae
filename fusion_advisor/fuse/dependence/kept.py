"""What is known of a value of a graph that runs at a larger size.

A call of size n runs at size N with its inputs extended. A value is *kept* if, cut back to n along each of its long axes, it is
the value of the call itself. A dim is a product of axes: batch times length after a view, which a later view parts again. An axis
is *long* if its size grows with the padded one. Its elements from n on are *junk*.

Each rule asks whether cutting and the op commute, whatever the inputs hold. Numbers are taken for exact ones that do not
overflow: where junk is multiplied by zero, it must be no infinity, and ``Span`` says which values can be one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Expression = Any
"""A size: a number, or an expression in dynamo's symbols."""


class Stops(Exception):
    """An element that is kept may depend on padding; the text says how.

    Attributes:
        is_placed: the text names the op.
    """

    def __init__(self, text: str, *, is_placed: bool = False) -> None:
        """Say how."""
        super().__init__(text)
        self.is_placed = is_placed


@dataclass(frozen=True, slots=True)
class Long:
    """An axis whose size grows with the padded one: elements from ``size`` at n on are junk."""

    size: Expression


Axes = tuple[tuple[Any, ...], ...]
"""For each dim its factors, outer ones first: ``Long`` or a size that does not grow. A dim of size 1 has none."""


class Span(enum.IntEnum):
    """Which values an element may have, in exact numbers."""

    FINITE = 0
    FINITE_OR_MINUS_INFINITY = 1
    ANY = 2


class Sign(enum.IntEnum):
    """What is known of an element's sign; an element that is a number may be both."""

    ANY = 0
    NOT_NEGATIVE = 1
    POSITIVE = 2


@dataclass(frozen=True, slots=True)
class Where:
    """Elements that something is known of, by ordinals of long axes.

    Attributes:
        row: kept along this axis; None: all.
        col: junk along this axis.
        is_diagonal: instead of both: the index along ``col`` is past that along ``row`` by as much as ``col`` is longer.
    """

    row: int | None
    col: int
    is_diagonal: bool = False


@dataclass(frozen=True, slots=True)
class Affine:
    """An integer that is computed from the element's place alone: a sum of indices times numbers, and an offset."""

    times: Mapping[int, int]
    offset: Expression

    def plus(self, other: Affine, by: int = 1) -> Affine:
        """Return the sum with a multiple of another."""
        times = dict(self.times)
        for axis, count in other.times.items():
            times[axis] = times.get(axis, 0) + by * count
        return Affine({axis: count for axis, count in times.items() if count}, self.offset + by * other.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A tensor of which what is kept does not depend on padding.

    Attributes:
        axes: of each dim.
        fill: the number that all elements are; None where they differ.
        facts: numbers that some elements are.
        live: (row, col) on whose diagonal every element is finite.
        affine: elements as a function of their place.
        span: of all elements, junk too.
        sign: of all elements.
        is_copied: junk along an axis holds nothing but what is kept along it: padding repeats the last row.
        is_free: elements are computed from sizes and from the model's tensors alone, so a call of the larger size has them too.
        bound: integers are from 0 up to this; None: unknown.
    """

    axes: Axes
    fill: float | bool | None = None
    facts: Mapping[Where, float | bool] = field(default_factory=dict)
    live: frozenset[tuple[int, int]] = frozenset()
    affine: Affine | None = None
    span: Span = Span.ANY
    sign: Sign = Sign.ANY
    is_copied: bool = False
    is_free: bool = False
    bound: int | None = None

    @property
    def places(self) -> list[tuple[int, int]]:
        """For each long axis, in order: its dim, and its place among the dim's factors."""
        return [
            (dim, at) for dim, factors in enumerate(self.axes) for at, factor in enumerate(factors) if isinstance(factor, Long)
        ]

    @property
    def sizes(self) -> list[Expression]:
        """The size of each long axis, in order."""
        return [self.axes[dim][at].size for dim, at in self.places]

    def is_long(self, dim: int) -> bool:
        """Whether a dim has a long axis."""
        return any(isinstance(factor, Long) for factor in self.axes[dim])

    def ordinals(self, dim: int) -> list[int]:
        """Return which long axes a dim has."""
        return [ordinal for ordinal, (own, _) in enumerate(self.places) if own == dim]

    def known(self, where: Where) -> float | bool | None:
        """Return the number that elements are; None where they may differ."""
        if self.fill is not None or where.is_diagonal:
            return self.facts.get(where) if self.fill is None else self.fill
        found = self.facts.get(where)
        return self.facts.get(Where(None, where.col)) if found is None else found

    def is_safe_place(self, rows: Expression) -> bool:
        """Whether junk is the place of a row in a table wherever what is kept is one.

        Args:
            rows: of the table.
        """
        is_bounded = self.bound is not None and isinstance(rows, int) and self.bound <= rows
        return self.is_copied or self.is_free or is_bounded


def moved(value: Kept, axes: Axes, target: Mapping[int, int], **changes: Any) -> Kept:
    """Return a value of other axes with what is known of those that it still has.

    Args:
        value: with its axes.
        axes: of the result.
        target: by ordinal of an axis that stays, its ordinal in the result.
        changes: of attributes.
    """
    facts = {
        Where(None if where.row is None else target[where.row], target[where.col], where.is_diagonal): number
        for where, number in value.facts.items()
        if where.col in target and (where.row is None or where.row in target)
    }
    live = frozenset((target[row], target[col]) for row, col in value.live if row in target and col in target)
    affine = value.affine
    if affine is not None:
        is_whole = all(axis in target for axis in affine.times)
        affine = Affine({target[axis]: by for axis, by in affine.times.items()}, affine.offset) if is_whole else None
    return replace(value, **{"axes": axes, "facts": facts, "live": live, "affine": affine, **changes})


def same_place(value: Kept, axes: Axes, dims: Callable[[int], int | None], **changes: Any) -> Kept:
    """Return what :func:`moved` does, where each dim goes as a whole.

    Args:
        value: with its axes.
        axes: of the result.
        dims: a dim's place in the result; None: it has none.
        changes: of attributes.
    """
    there = {place: ordinal for ordinal, place in enumerate(Kept(axes=axes).places)}
    target = {}
    for ordinal, (dim, at) in enumerate(value.places):
        new = dims(dim)
        if new is not None and (new, at) in there:
            target[ordinal] = there[new, at]
    return moved(value, axes, target, **changes)


def none_long(values: Iterable[Kept]) -> bool:
    """Whether no value has a long axis."""
    return not any(value.places for value in values)
