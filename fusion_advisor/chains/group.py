"""A group of ops that may become one kernel, and the answer whether one kernel can compute it."""

from __future__ import annotations

from collections.abc import Callable
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
