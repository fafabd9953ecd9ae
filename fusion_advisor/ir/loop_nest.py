"""The loop nest that a chain is lowered over: the iteration shape, each dim as one loop or cut into several."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fusion_advisor.ir.affine_index import Index, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Nest:
    """An iteration shape and its loops.

    Attributes:
        shape: the shape that is iterated over.
        factors: per dim the sizes of its loops, outermost first; their product is the dim's size.
    """

    shape: tuple[int, ...]
    factors: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(shape: tuple[int, ...]) -> Nest:
        """One loop per dim."""
        return Nest(shape=shape, factors=tuple((size,) for size in shape))

    @property
    def extents(self) -> tuple[int, ...]:
        """Size of every loop; loops are numbered in this order."""
        return tuple(size for sizes in self.factors for size in sizes)

    def index(self) -> Index:
        """The place of the running element in every dim."""
        found, variable = [], 0
        for sizes in self.factors:
            terms = [(variable + n, math.prod(sizes[n + 1 :])) for n in range(len(sizes))]
            found.append(Place(tuple(terms)))
            variable += len(sizes)
        return tuple(found)

    def cut(self, variable: int, inner: int) -> Nest:
        """Cut one loop into an outer one and an inner one of size ``inner``, which divides it."""
        factors, first = [], 0
        for sizes in self.factors:
            at = variable - first
            is_cut = 0 <= at < len(sizes)
            factors.append((*sizes[:at], sizes[at] // inner, inner, *sizes[at + 1 :]) if is_cut else sizes)
            first += len(sizes)
        return replace(self, factors=tuple(factors))
