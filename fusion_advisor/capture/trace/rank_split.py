"""Splits the traced time of each rank into compute, communication, waiting for other ranks, and idle time.

A collective ends on all ranks at about the same time, and begins on each when that rank comes to it. The rank that comes last
waits for nobody. So of the same collective the shortest duration is its communication, and what it takes longer on another rank
is that rank's waiting, at the collective's begin. Clocks of the ranks are not compared: only durations are.

What runs while the rank computes costs nothing: communication and waiting count where no compute runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fusion_advisor.capture.trace.events import GLOO_RANGE
from fusion_advisor.capture.trace.kernels import Work
from fusion_advisor.records import OpClass

Interval = tuple[int, int]
"""Begin and end in nanoseconds on a trace's own clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A rank's time; compute, communication, waiting and idle add up to its span.

    Attributes:
        compute_ns: at least one kernel that is no collective runs.
        communication_ns: only a collective runs, and all ranks have come to it.
        waiting_ns: only a collective runs, and another rank has not come to it.
        idle_ns: nothing runs.
        hidden_ns: a collective and compute run at once; part of compute_ns.
        collectives: how many.
    """

    compute_ns: int
    communication_ns: int
    waiting_ns: int
    idle_ns: int
    hidden_ns: int
    collectives: int


def split_ranks(ranks: Sequence[tuple[Sequence[Work], int]]) -> tuple[tuple[Split, ...], bool]:
    """Split the time of each rank.

    Args:
        ranks: the work of each rank, in order of time, and its span in nanoseconds.

    Returns:
        A split for each rank, and whether all saw the same collectives in the same order. Where they did not, nothing tells which
        of them belong together: their whole time is communication.
    """
    collectives = [_collectives(work) for work, _ in ranks]
    are_alike = len({tuple(_kind(one) for one in own) for own in collectives}) == 1
    shortest = [min(one.duration_ns for one in each) for each in zip(*collectives, strict=True)] if are_alike else []
    splits = []
    for (work, span_ns), own in zip(ranks, collectives, strict=True):
        compute = _union((one.start_ns, one.start_ns + one.duration_ns) for one in work if one.category != OpClass.COLLECTIVE)
        between = _union((one.start_ns, one.start_ns + one.duration_ns) for one in own)
        waits = _union(
            (one.start_ns, one.start_ns + one.duration_ns - least) for one, least in zip(own, shortest, strict=are_alike)
        )
        exposed, waiting_ns = _without(between, compute), _length(_without(waits, compute))
        busy_ns = _length(compute) + _length(exposed)
        splits.append(
            Split(
                compute_ns=_length(compute), communication_ns=_length(exposed) - waiting_ns, waiting_ns=waiting_ns,
                idle_ns=max(0, span_ns - busy_ns), hidden_ns=_length(between) - _length(exposed), collectives=len(own),
            )
        )  # fmt: skip
    return tuple(splits), are_alike


def _collectives(work: Sequence[Work]) -> list[Work]:
    """Return a rank's collectives; on a CPU what the process group ran, not the op that only asked for it."""
    found = [one for one in work if one.category == OpClass.COLLECTIVE]
    return [one for one in found if one.kernel_name.startswith(GLOO_RANGE)] or found


def _kind(collective: Work) -> str:
    """Return what must be equal on all ranks: algorithms may differ (``ncclDevKernel_AllReduce_Sum_bf16_RING_LL(…)``)."""
    return collective.label if collective.call >= 0 else "_".join(collective.kernel_name.split("_")[:2])


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the moments that lie in any of the intervals, as intervals in order that do not meet."""
    merged: list[Interval] = []
    for start, end in sorted(one for one in intervals if one[1] > one[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the moments of ``intervals`` that lie in none of ``others``; both as :func:`_union` gives them."""
    return list(_remaining(intervals, others))


def _remaining(intervals: Sequence[Interval], others: Sequence[Interval]) -> Iterator[Interval]:
    first = 0
    for start, end in intervals:
        while first < len(others) and others[first][1] <= start:
            first += 1
        at, place = start, first
        while place < len(others) and others[place][0] < end:
            if others[place][0] > at:
                yield at, others[place][0]
            at = max(at, others[place][1])
            place += 1
        if at < end:
            yield at, end


def _length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)
