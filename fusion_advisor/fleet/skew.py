"""The ranks of one job: how long each computes, transfers, waits for the others and idles.

A collective ends on all ranks at about the same time, so it takes longest where it began first. The k-th collective of every rank
is the same one; the shortest of them is the transfer, and what another rank takes longer is its waiting.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from fusion_advisor.records.trace import RankRow

_MOST_ROWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """One trace of one rank."""

    job: str
    rank: int
    number: int
    """Counts the traces of the rank, in order of time: those of one number were taken together."""
    span_ns: int
    compute_ns: int
    communication_ns: int
    collectives_ns: tuple[int, ...]


def skewed(traces: Sequence[RankTimes]) -> tuple[RankRow, ...]:
    """Return a row for each rank of each job, the job whose ranks wait most unequally first.

    Args:
        traces: sorted by job.
    """
    jobs: list[list[RankRow]] = []
    for job, found in itertools.groupby(traces, key=lambda trace: trace.job):
        own = list(found)
        waiting = _waiting_shares(own)
        ranks = sorted({trace.rank for trace in own})
        jobs.append([_row(job, rank, [trace for trace in own if trace.rank == rank], waiting) for rank in ranks])
    jobs.sort(key=lambda rows: min(row.waiting_share for row in rows) - max(row.waiting_share for row in rows))
    return tuple(itertools.islice(itertools.chain.from_iterable(jobs), _MOST_ROWS))


def _waiting_shares(traces: Sequence[RankTimes]) -> dict[tuple[int, int], float]:
    """Return the share of its collectives' time that each trace waited; 0 where its ranks do not have equally many."""
    shares: dict[tuple[int, int], float] = {}
    for number in {trace.number for trace in traces}:
        together = [trace for trace in traces if trace.number == number]
        counts = {len(trace.collectives_ns) for trace in together}
        shortest = [min(column) for column in zip(*(trace.collectives_ns for trace in together), strict=False)]
        for trace in together:
            total = sum(trace.collectives_ns)
            is_alike = len(counts) == 1 and len(together) > 1 and total > 0
            shares[trace.rank, number] = 1 - sum(shortest) / total if is_alike else 0.0
    return shares


def _row(job: str, rank: int, traces: Sequence[RankTimes], waiting: dict[tuple[int, int], float]) -> RankRow:
    span = max(1, sum(trace.span_ns for trace in traces))
    compute = sum(trace.compute_ns for trace in traces)
    communication = sum(trace.communication_ns for trace in traces)
    waited = sum(trace.communication_ns * waiting[rank, trace.number] for trace in traces)
    return RankRow(
        job=job,
        rank=rank,
        traces=len(traces),
        span_ns=span,
        compute_share=compute / span,
        transfer_share=(communication - waited) / span,
        waiting_share=waited / span,
        idle_share=max(0.0, 1 - (compute + communication) / span),
    )
