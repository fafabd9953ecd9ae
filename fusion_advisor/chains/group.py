"""A group of ops that may become one kernel, and the answer whether one kernel can compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Answer of ``judge`` about a candidate group."""

    is_fusible: bool
    floor_bytes: int = 0
    """Each outer input read once, each outer output written once."""
    key: str = ""
    """Equal for groups that one kernel serves on equal layouts: they are folded into one row."""
    code: str = ""
    reason: str = ""


Judge = Callable[[tuple[int, ...], tuple[int, ...]], Verdict]
"""Called with a group's members (in order) and outputs."""
HasKernel = Callable[[tuple[int, ...], tuple[int, ...]], bool]
"""Called likewise with two groups as one that a judge found fusible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A chain at one place, before equal ones are folded."""

    members: tuple[int, ...]
    """In order; views that only glue the chain together included."""
    outputs: tuple[int, ...]
    verdict: Verdict


def is_convex(members: frozenset[int], ancestors: Sequence[int]) -> bool:
    """Whether no path leaves a group and comes back: such a kernel would wait for itself.

    Args:
        members: of the group.
        ancestors: for each op the set of all that it is computed from, itself included, as the bits of a number.
    """
    mask = sum(1 << member for member in members)
    above = 0
    for member in members:
        above |= ancestors[member]
    first = min(members)
    between = (above & ~mask) >> first
    while between:
        lowest = (between & -between).bit_length() - 1
        if ancestors[first + lowest] & mask:
            return False
        between &= between - 1
    return True
