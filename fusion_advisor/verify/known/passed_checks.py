"""Checks that no size decides: rows of special numbers that a kernel has passed need not be tried at each further size.

Whether a NaN, an infinity or a subnormal number comes out right follows from what the kernel computes for an element, not from
how many rows there are. So a check is known by all that may make a difference: the program but for its sizes, from which the
source is printed, the launch parameters, what a compiler may assume of each size (that it is 1, or a multiple of 16, 8, 4 or 2),
the width of rows that are reduced, the original ops, and the user's limits.

All else is checked at every size: random numbers of several magnitudes, the site's own tensors, NaN in the last element of each
operand, masks, indices, two equal calls, and the memory around the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node
from torch.utils import _pytree as pytree

from fusion_advisor.ir.program import Program, layout_key, nests
from fusion_advisor.records import Tolerance
from fusion_advisor.verify.subgraph_oracle import OriginalChain

_VECTOR = 16
"""No compiler assumes more of a number than that it is a multiple of this."""


@dataclass(slots=True)
class PassedChecks:
    """Rows of special numbers that kernels have passed, in all classes.

    Attributes:
        keys: of the kernels.
    """

    keys: set[Hashable] = field(default_factory=set)

    @staticmethod
    def key(
        chain: OriginalChain, program: Program, entry: str, tuning: str, *, fast_math: bool, tolerance: Tolerance | None = None
    ) -> Hashable:
        """Return what is equal for checks that have one answer.

        Args:
            chain: the original ops.
            program: the kernel's, at the sizes of the check.
            entry: the kernel's name, which holds its title, its options and a digest of the rest.
            tuning: its launch parameters, as bound for these sizes.
            fast_math: whether it approximates.
            tolerance: the user's limit.
        """
        parts = [part.program for part in nests(program)]
        widths = tuple(part.dims[-1] for part in parts if part.is_reduced)
        assumed = tuple(tuple(map(_assumed, numbers)) for part in parts for numbers in _sizes_of(part))
        return (entry, tuning, layout_key(program), widths, assumed, tuple(map(_form, chain.nodes)), fast_math, tolerance)


def _sizes_of(program: Program) -> Iterator[tuple[int, ...]]:
    yield program.dims
    yield from ((*one.strides, *one.steps, one.offset) for one in program.values)
    yield from ((*one.strides, *one.steps, one.offset) for one in program.stores)
    yield tuple(int(value.constant or 0) for value in program.values if value.op == "extent")


def _assumed(number: int) -> int:
    """Return what a compiler may know of a size: that it is 0 or 1, or its largest divisor among 16, 8, 4 and 2."""
    return number if number in (0, 1) else 100 + math.gcd(number, _VECTOR)


def _form(node: Node) -> Hashable:
    """Return an op and what it is given that is neither a tensor nor a size."""

    def plain(value: Any) -> str:
        return "" if isinstance(value, Node) or type(value) is int else repr(value)

    value = node.meta.get("val")
    return str(node.target), tuple(map(plain, pytree.tree_leaves((node.args, node.kwargs)))), str(getattr(value, "dtype", ""))
