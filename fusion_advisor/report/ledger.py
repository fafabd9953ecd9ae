"""From the headline's time before to its time after, change by change: the sum of the rows is the gain, in every view.

Rewrites are timed on the captured step (on a GPU as replays, without the host), the headline on the whole call. The last row is
what lies between the two clocks: launches and the host's own work.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor.records import Fusion, GraphRewrite, Report, RewriteStage, Status
from fusion_advisor.report import baseline_rows, shared_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One change of the step's time.

    Attributes:
        id: of the rewrite, or ``together``, ``host``.
        title: for readers.
        delta_ns: what it changed.
        level_ns: the step's time after it.
        is_measured: False for what is left over between two measurements.
    """

    id: str
    title: str
    delta_ns: int
    level_ns: int
    is_measured: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The headline's two times and all that lies between them.

    Attributes:
        clock: ``wall time``, ``CPU time`` or ``device time``: of both ends.
        before_ns: the eager step.
        after_ns: the step with all that was kept.
        entries: in the order of trying; ``before_ns`` and their changes add up to ``after_ns``.
    """

    clock: str
    before_ns: int
    after_ns: int
    entries: tuple[Entry, ...]


def ledger(report: Report) -> Ledger | None:
    """Return the changes between the headline's two times; None for a profile.

    Where nothing was kept there are no entries, and both times are the eager step's.
    """
    pair = shared_rows.step_pair(report)
    if pair is None:
        return None
    clock, before, after = pair
    if baseline_rows.is_unchanged(report):
        return Ledger(clock=clock, before_ns=before.median_ns, after_ns=before.median_ns, entries=())
    level, entries = before.median_ns, []

    def add(name: str, title: str, delta_ns: int, *, is_measured: bool = True) -> None:
        nonlocal level
        level += delta_ns
        entries.append(Entry(id=name, title=title, delta_ns=delta_ns, level_ns=level, is_measured=is_measured))

    stacked = 0
    for row in in_order(report):
        if row.status in (Status.KEPT, Status.ABSORBED) and row.step_delta_ns is not None:
            stacked += row.step_delta_ns
            add(row.id, row.kernel if isinstance(row, Fusion) else row.name, row.step_delta_ns)
    if entries and report.step_before is not None and report.step_after is not None:
        joint = report.step_after.median_ns - report.step_before.median_ns
        add("together", "all together, measured again", joint - stacked, is_measured=False)
    for graph in report.rewrites:
        if graph.stage is RewriteStage.CALL and graph.status is Status.KEPT and graph.step_delta_ns is not None:
            add(graph.id, graph.name, graph.step_delta_ns)
    if level != after.median_ns:
        add("host", "launches and host time", after.median_ns - level, is_measured=False)
    return Ledger(clock=clock, before_ns=before.median_ns, after_ns=after.median_ns, entries=tuple(entries))


def in_order(report: Report) -> list[Fusion | GraphRewrite]:
    """Return rewrites and fusions of the step in the order in which they were timed; the CUDA graph is of the call."""
    passes = [row for row in report.rewrites if row.stage is RewriteStage.PASS]
    chains = [row for row in report.fusions if row.chain_id]
    on_top = [row for row in report.rewrites if row.stage is RewriteStage.ON_TOP]
    return [*passes, *chains, *on_top, *(row for row in report.fusions if not row.chain_id)]
