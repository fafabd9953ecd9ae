"""``profile --trace DIR``: one report of the traces of several ranks, a file for each.

Counts and times of all ranks are summed. Comparing the ranks' collectives shows how long each communicated and waited
(:mod:`fusion_advisor.capture.trace.rank_split`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusion_advisor.capture.trace.chrome_trace import TraceFile
from fusion_advisor.capture.trace.events import read_events
from fusion_advisor.capture.trace.kernels import Work
from fusion_advisor.capture.trace.rank_split import Split, split_ranks
from fusion_advisor.errors import UnreadableTrace
from fusion_advisor.fuse.modes.trace_profile import join_trace, rank_trace, ranked_kernels, summed_categories
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.library.trace_hints import library_sequences
from fusion_advisor.records import TraceChain, TraceRank, TraceReport
from fusion_advisor.runtime.gc_pause import collector_paused

_ALL = 1_000_000
"""More rows than a trace has: rows are summed over the ranks before ``--top`` cuts them."""
_IN_NAME = re.compile(r"rank[_-]?(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankTrace:
    rank: int
    world_size: int
    path: Path
    work: tuple[Work, ...]
    report: TraceReport


@collector_paused()
def profile_rank_traces(
    directory: Path,
    *,
    min_share: float,
    top: int,
    kernel_dirs: Sequence[Path] = (),
    tool: str = "",
    progress: Progress | None = None,
) -> TraceReport:
    """Rank the kernels and repeated chains of all traces in a folder; the report has a row for each rank.

    Args:
        directory: holds a trace for each rank, ``.json`` or ``.json.gz``. torch.profiler writes the rank into it where there is a
            process group; else the file's name tells it (``rank3``).
        min_share: chains with a smaller share of the devices' busy time are left out.
        top: at most so many chains, and so many kernels.
        kernel_dirs: folders of a user's own kernels.
        tool: fusion-advisor's own version, for the record.
        progress: is given each phase and its counts.

    Raises:
        UnreadableTrace: the folder holds no trace, two of one rank, or a damaged one.
        MissingKernels: more than 1 % of a trace's launches have no kernel.
    """
    clock = PhaseClock(progress or Progress())
    paths = sorted(path for path in directory.iterdir() if path.name.endswith((".json", ".json.gz")))
    if not paths:
        raise UnreadableTrace(name=directory, detail="the folder holds no .json and no .json.gz", known="")
    sequences = library_sequences(kernel_dirs)
    traces: list[_RankTrace] = []
    for path in paths:
        with clock.phase(f"read {path.name}"):
            traces.append(_read(path, len(traces), sequences, min_share=min_share, tool=tool))
            clock.progress.note(f"rank {traces[-1].rank}, {traces[-1].report.events:,} events")
    traces.sort(key=lambda one: one.rank)
    for one, other in itertools.pairwise(traces):
        if one.rank == other.rank:
            detail = f"{one.path.name} and {other.path.name} are both of rank {one.rank}: leave one trace of each rank there"
            raise UnreadableTrace(name=directory, detail=detail, known="")
    with clock.phase("ranks"):
        return _merged(directory, traces, min_share=min_share, top=top)


def _read(path: Path, number: int, sequences: Any, *, min_share: float, tool: str) -> _RankTrace:
    file = TraceFile(path)
    found = join_trace(file, read_events(file.typed_events()))
    distributed = found.facts.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    in_name = _IN_NAME.search(path.name)
    rank, world_size = distributed.get("rank"), distributed.get("world_size")
    return _RankTrace(
        rank=rank if type(rank) is int else int(in_name[1]) if in_name else number,
        world_size=world_size if type(world_size) is int else 0,
        path=path,
        work=found.work,
        report=rank_trace(found, sequences, min_share=min_share, top=_ALL, tool=tool),
    )


def _merged(directory: Path, traces: Sequence[_RankTrace], *, min_share: float, top: int) -> TraceReport:
    reports = [one.report for one in traces]
    splits, are_alike = split_ranks([(one.work, one.report.span_ns) for one in traces])
    busy_ns = sum(one.busy_ns for one in reports)
    chains = [one for one in _chains(reports, busy_ns) if one.share >= min_share]
    rows = ((one.name, one.op, one.category, one.count, one.device_ns) for report in reports for one in report.ranked)
    kernels = ranked_kernels(rows, busy_ns)
    return replace(
        reports[0],
        trace=str(directory),
        device_names=tuple(dict.fromkeys(name for one in reports for name in one.device_names)),
        events=sum(one.events for one in reports),
        launches=sum(one.launches for one in reports),
        kernels=sum(one.kernels for one in reports),
        span_ns=sum(one.span_ns for one in reports),
        busy_ns=busy_ns,
        joined_share=sum(one.joined_share * one.busy_ns for one in reports) / max(busy_ns, 1),
        has_shapes=all(one.has_shapes for one in reports),
        categories=summed_categories(row for one in reports for row in one.categories),
        ranked=kernels[:top],
        ranked_left_out=max(0, len(kernels) - top),
        chains=tuple(replace(one, id=f"C{number}") for number, one in enumerate(chains[:top], start=1)),
        chains_left_out=max(0, len(chains) - top),
        searched_share=min(one.searched_share for one in reports),
        bytes_per_s=max((one.bytes_per_s for one in reports if one.bytes_per_s), default=None),
        unknown=tuple(dict.fromkeys(sentence for one in reports for sentence in one.unknown)),
        warnings=(
            *_differences(traces, are_alike=are_alike),
            *(f"{one.path.name}: {words}" for one in traces for words in one.report.warnings),
        ),
        ranks=tuple(itertools.starmap(_row, zip(traces, splits, strict=True))),
    )


def _row(trace: _RankTrace, split: Split) -> TraceRank:
    return TraceRank(
        rank=trace.rank, trace=trace.path.name, device=", ".join(trace.report.device_names) or "CPU",
        span_ns=trace.report.span_ns, compute_ns=split.compute_ns, communication_ns=split.communication_ns,
        waiting_ns=split.waiting_ns, idle_ns=split.idle_ns, hidden_ns=split.hidden_ns, collectives=split.collectives,
    )  # fmt: skip


def _differences(traces: Sequence[_RankTrace], *, are_alike: bool) -> Iterable[str]:
    """Say what of the ranks does not fit together."""
    world_size = max(one.world_size for one in traces)
    if world_size > len(traces):
        yield f"{len(traces)} of {world_size} ranks have a trace here; waiting for another rank counts as communication"
    if not are_alike:
        yield "the ranks' collectives differ in number or order, so waiting is not told apart from communication"
    if len({one.report.steps for one in traces}) > 1:
        yield "the ranks' traces hold different numbers of steps"
    if len({one.report.device_kind for one in traces}) > 1:
        yield "some traces hold GPU work and others do not"


def _chains(reports: Sequence[TraceReport], busy_ns: int) -> list[TraceChain]:
    """Sum chains of the same ops and kernels over the ranks."""
    sums: dict[tuple[object, object], TraceChain] = {}
    for chain in (one for report in reports for one in report.chains):
        key = chain.ops, chain.kernels
        known = sums.get(key)
        sums[key] = chain if known is None else _both(known, chain)
    rows = (replace(one, share=one.device_ns / max(busy_ns, 1)) for one in sums.values())
    return sorted(rows, key=lambda one: -one.device_ns)


def _both(one: TraceChain, other: TraceChain) -> TraceChain:
    return replace(
        one, sites=one.sites + other.sites, launches=one.launches + other.launches, device_ns=one.device_ns + other.device_ns,
        saving_bound_ns=_sum(one.saving_bound_ns, other.saving_bound_ns), floor_bytes=_sum(one.floor_bytes, other.floor_bytes),
    )  # fmt: skip


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
