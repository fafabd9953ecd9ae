"""Splits each rank's traced step into compute, communication, waiting and idle time.

A collective ends on all ranks at about the same time and begins on each when that rank comes to it. The rank that comes last
waits for nobody: the shortest duration of a collective is its communication, and what it takes longer on another rank is waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusion_advisor.records import Capture, Launch, OpClass, RankTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a rank tells of its traced step.

    Attributes:
        device: its name.
        span_ns: from the first op's begin to the last one's end.
        compute_ns: of all other ops.
        collectives_ns: of each op between ranks, in order.
    """

    device: str
    span_ns: int
    compute_ns: int
    collectives_ns: tuple[int, ...]


def told_of(capture: Capture) -> Told:
    """Return what a rank tells of its step.

    Args:
        capture: with the rank's own times.
    """
    launches = capture.launches
    end_ns = max((one.start_ns + one.duration_ns for one in launches), default=0)
    return Told(
        device=f"{capture.workload.device} ({capture.environment.device_name})",
        span_ns=end_ns - min((one.start_ns for one in launches), default=0),
        compute_ns=sum(one.duration_ns for one in launches if not _is_between(one)),
        collectives_ns=tuple(one.duration_ns for one in between_ranks(launches)),
    )


def _is_between(launch: Launch) -> bool:
    return launch.category == OpClass.COLLECTIVE


def without_waiting(launches: Sequence[Launch], told: Sequence[Sequence[int]]) -> tuple[Launch, ...]:
    """Return a step's launches whose ops between ranks take what they take on the rank that comes last.

    Shares of a step would else say how long this rank waited for others.

    Args:
        launches: of one rank.
        told: nanoseconds of the ops between ranks, in order, by all ranks.
    """
    between = between_ranks(launches)
    if {len(one) for one in told} != {len(between)}:
        return tuple(launches)
    shortest = {id(one): min(each) for one, *each in zip(between, *told, strict=True)}
    return tuple(replace(one, duration_ns=shortest.get(id(one), one.duration_ns)) for one in launches)


def between_ranks(launches: Sequence[Launch]) -> list[Launch]:
    """Return the ops between ranks in the order of their begin."""
    return sorted(filter(_is_between, launches), key=lambda one: one.start_ns)


def rank_times(told: Sequence[Told]) -> tuple[RankTime, ...]:
    """Return a row for each rank.

    Args:
        told: by all ranks, in their order. Where they saw different numbers of collectives, no waiting is told apart.
    """
    are_alike = len({len(one.collectives_ns) for one in told}) == 1
    shortest = [min(each) for each in zip(*(one.collectives_ns for one in told), strict=True)] if are_alike else []
    rows = []
    for rank, one in enumerate(told):
        both_ns = sum(one.collectives_ns)
        communication_ns = sum(shortest) if are_alike else both_ns
        rows.append(
            RankTime(
                rank=rank, device=one.device, compute_ns=one.compute_ns, communication_ns=communication_ns,
                waiting_ns=both_ns - communication_ns, idle_ns=max(0, one.span_ns - one.compute_ns - both_ns),
            )
        )  # fmt: skip
    return tuple(rows)
