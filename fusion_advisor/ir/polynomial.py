"""Polynomials in sizes with whole-number values: extents, strides and offsets of a kernel as functions of batch and length.

A tensor's strides are products of its sizes, so each number of a loop nest is a polynomial of low degree in the sizes that
vary. It is found from its values on a grid of sizes (tensor-product interpolation, exact in fractions) and tried on others.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

DEGREE = 2
"""Of each size: attention scores have strides of the length squared."""


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A sum of terms.

    Attributes:
        terms: coefficient and the exponent of each size, in the order of the names.
    """

    terms: tuple[tuple[Fraction, tuple[int, ...]], ...]

    def at(self, sizes: Sequence[int]) -> int:
        """Return the value.

        Args:
            sizes: in the order of the names.

        Raises:
            ValueError: it is no whole number.
        """
        total = Fraction(0)
        for coefficient, exponents in self.terms:
            total += coefficient * prod(size**exponent for size, exponent in zip(sizes, exponents, strict=True))
        if total.denominator != 1:
            raise ValueError(f"{total} is no whole number")
        return int(total)

    @property
    def is_constant(self) -> bool:
        """Whether it is the same at all sizes."""
        return not any(any(exponents) for _, exponents in self.terms)


def grid(values: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the points of a grid, the last size running fastest.

    Args:
        values: of each size, different ones.
    """
    return list(itertools.product(*values))


def through(values: Sequence[Sequence[int]], results: Mapping[tuple[int, ...], int]) -> Polynomial:
    """Return the polynomial that takes given values on a grid.

    Args:
        values: of each size on the grid: the polynomial's degree in it is one less than there are.
        results: by point of the grid.
    """
    table = {point: Fraction(results[point]) for point in grid(values)}
    for axis, nodes in enumerate(values):  # from values to coefficients, one size at a time
        changed: dict[tuple[int, ...], Fraction] = {}
        rows = _inverse_vandermonde(nodes)
        others = [range(len(one)) if place < axis else one for place, one in enumerate(values)]
        for rest in itertools.product(*(others[:axis] + others[axis + 1 :])):
            line = [table[(*rest[:axis], node, *rest[axis:])] for node in nodes]
            for exponent, row in enumerate(rows):
                changed[(*rest[:axis], exponent, *rest[axis:])] = sum(
                    (weight * value for weight, value in zip(row, line, strict=True)), Fraction(0)
                )
        table = changed
    return Polynomial(tuple((coefficient, point) for point, coefficient in table.items() if coefficient))


def _inverse_vandermonde(nodes: Sequence[int]) -> list[list[Fraction]]:
    """Return, for each exponent, what each node's value adds to its coefficient (Lagrange's basis, multiplied out)."""
    rows = [[Fraction(0)] * len(nodes) for _ in nodes]
    for column, node in enumerate(nodes):
        basis = [Fraction(1)]
        for other in nodes:
            if other != node:
                scale = Fraction(1, node - other)
                raised = [Fraction(0), *(scale * one for one in basis)]
                basis = [high - other * scale * low for high, low in zip(raised, [*basis, Fraction(0)], strict=True)]
        for exponent, coefficient in enumerate(basis):
            rows[exponent][column] = coefficient
    return rows
