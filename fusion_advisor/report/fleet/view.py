"""Sentences and rows of a fleet's ranking, the same in every view."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records.trace import ChainRow, FleetReport, GroupRow, Interval, RankRow
from fusion_advisor.report.escape import plural

_NS_PER_HOUR = 3.6e12
_MANY = 20
"""Failed traces that are listed; the JSON holds all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table whose first column is a name."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    is_code: bool = False
    """Names are op names or paths."""


def hours(value: float) -> str:
    """Return GPU-hours; a time below an hour in its own unit."""
    if value >= 1:
        return f"{value:,.0f} h" if value >= 100 else f"{value:.1f} h"
    return units.seconds(value * 3600) if value * 3600 >= 1 else units.duration(value * _NS_PER_HOUR)


def saving(interval: Interval | None) -> str:
    """Return a saving with its bounds."""
    if interval is None:
        return "not known"
    return f"{hours(interval.middle)} [{hours(interval.low)}, {hours(interval.high)}]"


def headline(report: FleetReport) -> str:
    """Return the answer in one sentence."""
    if not report.traces:
        return "No trace could be ranked."
    read = f"{plural(report.traces, 'trace')} of {plural(report.jobs, 'job')}, {_amount(report)}"
    if not report.chains:
        return f"{read}: no chain of pointwise and reduction kernels repeats with a share worth naming."
    total = dict(report.coverage).get("chains", 0.0)
    first = report.chains[0]
    return f"{read}: {units.share(total)} of it is in chains; {first.ops} alone takes {units.share(first.share)}."


def _amount(report: FleetReport) -> str:
    return f"{hours(report.gpu_hours)} of GPU time" + ("" if report.is_weighted else " in the traces themselves")


def notes(report: FleetReport) -> tuple[str, ...]:
    """Return what a reader must know to trust the figures."""
    found = []
    if report.failed:
        kinds = Counter(failed.code for failed in report.failed)
        listed = ", ".join(f"{count} × {code}" for code, count in kinds.most_common())
        found.append(f"{plural(len(report.failed), 'file')} could not be ranked ({listed}).")
    if report.unweighted_jobs:
        names = ", ".join(report.unweighted_jobs[:5]) + (" …" if len(report.unweighted_jobs) > 5 else "")
        found.append(f"--weights does not name {plural(len(report.unweighted_jobs), 'job')}, which count nothing: {names}.")
    if report.same:
        found.append(f"{plural(report.same, 'file')} with the content of another file count once.")
    if report.sampled:
        found.append(
            f"Of {plural(report.sampled, 'large trace')} only the first steps were ranked; their times are scaled to the whole."
        )
    if not report.is_weighted and report.traces:
        found.append("Times are those of the traces; --weights jobs.csv scales each job to the GPU-hours that it burns.")
    return tuple(found)


METHOD = (
    "A saving is what one kernel per site would save: the upper bound at the fastest rate that the trace itself shows, the "
    "middle at 95 % and the lower bound at 80 % of it, which the library's kernels reach in the median and in the worst tenth. "
    "A chain without a library kernel has 0 as its lower bound, because a trace does not show whether it may be fused."
)


def chain_table(report: FleetReport) -> Table:
    """Return the chains, most GPU-hours first."""
    rows = tuple(
        (
            chain.ops,
            chain.kernel or "–",
            units.number(chain.jobs),
            units.number(chain.traces),
            hours(chain.gpu_hours),
            units.share(chain.share),
            _chain_saving(chain),
        )
        for chain in report.chains
    )
    left = f"{plural(report.chains_left_out, 'chain')} beyond --top." if report.chains_left_out else ""
    heads = ("Chain", "Library kernel", "Jobs", "Traces", "GPU time", "Share", "A kernel would save")
    return Table(title="Chains over the fleet", heads=heads, rows=rows, note=left, is_code=True)


def _chain_saving(chain: ChainRow) -> str:
    if chain.saving is None:
        return "not known"
    part = f" (of {units.share(chain.saving_share_known)} of its time)" if chain.saving_share_known < 0.995 else ""
    return saving(chain.saving) + part


def coverage_table(report: FleetReport) -> Table:
    """Return where the GPU time goes; the shares sum to 1."""
    rows = tuple((name, hours(share * report.gpu_hours), units.share(share)) for name, share in report.coverage)
    return Table(title="Where the GPU time goes", heads=("Class", "GPU time", "Share"), rows=rows)


def group_tables(report: FleetReport) -> tuple[Table, ...]:
    """Return the tables by job, model, GPU and day, and the launch-bound jobs."""
    found = [
        _groups("By model", "Model", report.by_model),
        _groups("By GPU", "GPU", report.by_gpu),
        _groups("By job", "Job", report.by_job),
        _groups("By day", "Day", report.by_day),
    ]
    bound = tuple((row.name, hours(row.gpu_hours), units.share(row.idle_share)) for row in report.launch_bound)
    note = "Their GPUs wait for launches more than 20 % of the time: a CUDA graph helps there more than a kernel."
    found.append(Table(title="Launch-bound jobs", heads=("Job", "GPU time", "Idle"), rows=bound, note=note if bound else ""))
    return tuple(table for table in found if table.rows)


def _groups(title: str, name: str, rows: tuple[GroupRow, ...]) -> Table:
    return Table(
        title=title,
        heads=(name, "Traces", "GPU time", "In chains", "Idle", "Kernels would save"),
        rows=tuple(
            (
                row.name,
                units.number(row.traces),
                hours(row.gpu_hours),
                units.share(row.chains_share),
                units.share(row.idle_share),
                saving(row.saving),
            )
            for row in rows
        ),
    )


def rank_table(report: FleetReport) -> Table:
    """Return the ranks of each job."""
    heads = ("Job", "Rank", "Compute", "Transfer", "Waiting", "Idle")
    note = "Waiting: time in collectives beyond the fastest rank's. A rank that waits least is the one that the others wait for."
    rows = tuple(_rank(row) for row in report.ranks)
    return Table(title="Ranks of one job", heads=heads, rows=rows, note=note if rows else "")


def _rank(row: RankRow) -> tuple[str, ...]:
    shares = (row.compute_share, row.transfer_share, row.waiting_share, row.idle_share)
    return (row.job, str(row.rank), *map(units.share, shares))


def failed_table(report: FleetReport) -> Table:
    """Return the files that could not be ranked."""
    rows = tuple((failed.url, failed.code, failed.error) for failed in report.failed[:_MANY])
    left = len(report.failed) - len(rows)
    note = f"{plural(left, 'more file')} in fleet.json." if left > 0 else ""
    return Table(title="Files that could not be ranked", heads=("File", "Code", "Why"), rows=rows, note=note, is_code=True)


def prove_lines(chain: ChainRow) -> tuple[str, ...]:
    """Return the commands that lead from a chain to its proof."""
    lines = [shlex.join(["fusion-advisor", "apply", model]) for model in chain.models[:1]]
    return (*lines, *(shlex.join(["fusion-advisor", "profile", "--trace", link.url]) for link in chain.links[:1]))
