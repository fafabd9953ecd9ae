"""A row for each rank: what its device did in the traced step; and a sentence on how the ranks share the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import RankRun, RankTime, TraceRank

HEADS = ("Rank", "Device", "Compute", "Communication", "Waiting", "Idle")
_WAYS = {
    "tensor parallel": "{count} ranks share each step (tensor parallel).",
    "replicas": "{count} ranks run a whole model each (replicas).",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksView:
    """What a report says of its ranks.

    Attributes:
        summary: how they share the model, and who waits.
        heads: of the columns.
        rows: one for each rank.
        note: what the figures are.
    """

    summary: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str


def ranks_view(run: RankRun | None) -> RanksView | None:
    """Return what a report says of its ranks; None where there was one process.

    Args:
        run: the report's.
    """
    if run is None:
        return None
    rows = [
        (
            str(row.rank), row.device, units.duration(row.compute_ns), units.duration(row.communication_ns),
            units.duration(row.waiting_ns), units.duration(row.idle_ns),
        )
        for row in run.rows
    ]  # fmt: skip
    return RanksView(summary=f"{_WAYS[run.way].format(count=len(rows))} {_skew(run.rows)}", heads=HEADS, rows=rows, note=_NOTE)


def trace_ranks_view(ranks: Sequence[TraceRank]) -> RanksView | None:
    """Return what a report says of the ranks of a folder of traces; None where one file was read.

    Args:
        ranks: the report's.
    """
    if not ranks:
        return None
    rows = [
        (
            str(row.rank), row.device, units.duration(row.compute_ns), units.duration(row.communication_ns),
            units.duration(row.waiting_ns), units.duration(row.idle_ns), units.duration(row.hidden_ns),
        )
        for row in ranks
    ]  # fmt: skip
    span_ns = max(sum(row.span_ns for row in ranks), 1)
    communication, waiting = (
        units.share(sum(one) / span_ns) for one in ([row.communication_ns for row in ranks], [row.waiting_ns for row in ranks])
    )
    summary = f"{len(rows)} ranks: communication takes {communication} of their time, waiting for one another {waiting}."
    words = f"{summary} {_skew(ranks)}" if len(ranks) > 1 else summary
    return RanksView(summary=words, heads=(*HEADS, "Hidden"), rows=rows, note=_TRACE_NOTE)


_NOTE = (
    "One traced step before rewrites. Waiting: the rank came to a collective before the last rank did. "
    "Verdicts are by the slowest rank's time in each run."
)


_TRACE_NOTE = (
    "The columns but the last add up to the traced time. Communication and waiting: a collective ran and nothing else. "
    "Waiting: the rank came to it before the last rank did. Hidden: a collective ran beside compute. "
    "All other figures are sums over the ranks."
)


def _skew(rows: Sequence[RankTime | TraceRank]) -> str:
    """Say which rank computes longest, and by how much."""
    slowest = max(rows, key=lambda row: row.compute_ns)
    fastest = min(rows, key=lambda row: row.compute_ns)
    share = slowest.compute_ns / max(fastest.compute_ns, 1) - 1
    return f"Rank {slowest.rank} computes {units.share(share)} longer than rank {fastest.rank}."
