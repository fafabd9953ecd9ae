"""``profile --trace``: what a trace of torch.profiler tells without its model, and what it cannot.

A trace shows which kernels ran, in which order, for which op calls. It does not show which value goes where. So a chain here is
a sequence that repeats, not one that may be fused; the model itself answers that (``profile MODEL_ID``).
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusion_advisor.capture.trace.chrome_trace import TraceFile
from fusion_advisor.capture.trace.events import Trace, is_step, read_events
from fusion_advisor.capture.trace.kernels import Work, device_work, missing_kernels
from fusion_advisor.chains.trace_bytes import Inputs, floor_bytes, moved_bytes
from fusion_advisor.errors import MissingKernels, UnreadableTrace
from fusion_advisor.fuse.modes.repeated_sites import Repeated, Site, labels, repeated_sites
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.library.trace_hints import library_sequences, resemblance
from fusion_advisor.records import TraceChain, TraceKernel, TraceReport
from fusion_advisor.runtime.gc_pause import collector_paused

MISSING_LIMIT_SHARE = 0.01
"""Above this share of launches without a kernel nothing is ranked; a few at the edges of a window are common."""
GEMM_MARK = "[gemm]"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWork:
    """A trace that was read and may be ranked."""

    path: Path
    facts: Mapping[str, Any]
    """The trace's other top-level keys."""
    events: int
    trace: Trace
    work: tuple[Work, ...]
    warnings: tuple[str, ...]


@collector_paused()
def profile_trace(
    path: Path,
    *,
    min_share: float,
    top: int,
    kernel_dirs: Sequence[Path] = (),
    tool: str = "",
    progress: Progress | None = None,
) -> TraceReport:
    """Rank a trace's kernels and the chains that it repeats.

    Args:
        path: ``.json`` or ``.json.gz``, as ``export_chrome_trace`` writes it.
        min_share: chains with a smaller share of the device's busy time are left out.
        top: at most so many chains, and so many kernels.
        kernel_dirs: folders of a user's own kernels; a chain is named after them as after the shipped ones.
        tool: fusion-advisor's own version, for the record.
        progress: is given each phase and its counts.

    Raises:
        UnreadableTrace: the file is cut short, damaged, or no trace of torch.profiler.
        MissingKernels: more than 1 % of the launches have no kernel.
    """
    clock = PhaseClock(progress or Progress())
    with clock.phase("read"):
        file = TraceFile(path)
        trace = read_events(file.typed_events())
        clock.progress.note(f"{file.events:,} events, {len(trace.kernels):,} kernels, {len(trace.cpu_ops):,} CPU ops")
    with clock.phase("join"):
        found = join_trace(file, trace)
    with clock.phase("chains"):
        report = rank_trace(found, library_sequences(kernel_dirs), min_share=min_share, top=top, tool=tool)
        clock.progress.note(f"{len(report.chains) + report.chains_left_out} that repeat")
    return report


def join_trace(file: TraceFile, trace: Trace) -> TraceWork:
    """Join a trace's kernels to their ops.

    Raises:
        UnreadableTrace: it holds no work.
        MissingKernels: more than 1 % of the launches have no kernel.
    """
    warnings = _checked(trace)
    work = tuple(device_work(trace))
    if not work:
        raise UnreadableTrace(name=file.path, detail="it holds no kernels and no CPU ops of torch.profiler", known="")
    return TraceWork(path=file.path, facts=file.facts, events=file.events, trace=trace, work=work, warnings=tuple(warnings))


def rank_trace(
    found: TraceWork, sequences: Mapping[tuple[str, ...], str], *, min_share: float, top: int, tool: str = ""
) -> TraceReport:
    """Rank the kernels of a joined trace and the chains that it repeats; arguments as in :func:`profile_trace`.

    Args:
        found: of :func:`join_trace`.
        sequences: op names of library kernels (:func:`fusion_advisor.library.trace_hints.library_sequences`).
        min_share: as there.
        top: as there.
        tool: as there.
    """
    work, trace = found.work, found.trace
    busy_ns = sum(item.busy_ns for item in work)
    rate = fastest_rate(work)
    repeated, searched = repeated_sites(work, sequences, least_ns=min_share * busy_ns)
    smallest_ns = _smallest_ns(work)
    rows = [_chain(one, sequences, busy_ns, rate, smallest_ns) for one in repeated]
    chains = sorted((chain for chain in rows if chain.share >= min_share), key=lambda chain: -chain.device_ns)
    ranked = ranked_kernels(((one.kernel_name, one.label, one.category, 1, one.busy_ns) for one in work), busy_ns)
    has_shapes = any(item.inputs for item in work)
    joined_share = sum(item.busy_ns for item in work if item.call >= 0) / max(busy_ns, 1)
    warnings = list(found.warnings)
    if searched < 1:
        warnings.append(f"repeats were looked for in {searched:.1%} of the pointwise and reduction time: too much of it differs")
    return TraceReport(
        trace=str(found.path),
        device_kind="cuda" if trace.kernels else "cpu",
        device_names=device_names(found.facts) if trace.kernels else (),
        tool=tool,
        events=found.events,
        steps=len({item.step for item in work} - {-1}),
        launches=missing_kernels(trace).launches,
        kernels=len(work),
        span_ns=span_ns(work),
        busy_ns=busy_ns,
        joined_share=joined_share,
        has_shapes=has_shapes,
        categories=summed_categories((one.category, 1, one.busy_ns) for one in work),
        ranked=ranked[:top],
        ranked_left_out=max(0, len(ranked) - top),
        chains=tuple(_numbered(chains[:top])),
        chains_left_out=max(0, len(chains) - top),
        searched_share=searched,
        bytes_per_s=None if rate is None else round(rate * 1e9),
        unknown=tuple(_unknown(trace, has_shapes=has_shapes, joined_share=joined_share)),
        warnings=tuple(warnings),
    )


def _checked(trace: Trace) -> list[str]:
    """Return what the reader should know of a trace that can be ranked; raise where it cannot."""
    warnings = []
    found = missing_kernels(trace)
    if found.missing > MISSING_LIMIT_SHARE * found.launches:
        if trace.kernels:
            known = "the profiler dropped them, or stopped before they ran"
        else:
            known = "another profiler (nsys, ncu) may have used the device's counters, or CUDA was not among the activities"
        raise MissingKernels(kernels=f"{found.launches - found.missing:,}", launches=f"{found.launches:,}", known=known)
    if found.missing:
        warnings.append(f"{found.missing:,} of {found.launches:,} launches have no kernel in the trace")
    if trace.unreadable:
        warnings.append(f"{trace.unreadable:,} events have no usable name or time and were left out")
    return warnings


# -- chains ----------------------------------------------------------------------------------------------------------------


def _chain(
    repeated: Repeated, sequences: Mapping[tuple[str, ...], str], busy_ns: int, rate: float | None, smallest_ns: int
) -> TraceChain:
    sites, first = repeated.sites, repeated.sites[0]
    ops = labels(first)
    like = resemblance(ops, sequences)
    device_ns = sum(item.busy_ns for site in sites for item in site)
    floors = _floors(sites)
    bound = None
    if floors is not None and rate is not None:
        bound = max(0, device_ns - sum(max(round(floor / rate), smallest_ns) for floor in floors))
    if repeated.gemm_at:
        ops = (*labels(first[: repeated.gemm_at]), GEMM_MARK, *labels(first[repeated.gemm_at :]))
    return TraceChain(
        id="",
        ops=ops,
        kernels=tuple(item.kernel_name for item in first),
        sites=len(sites),
        launches=sum(map(len, sites)),
        device_ns=device_ns,
        share=device_ns / max(busy_ns, 1),
        saving_bound_ns=bound,
        floor_bytes=None if floors is None else sum(floors),
        kernel=like.kernel if like else "",
        is_whole=like.is_whole if like else True,
    )


def _numbered(chains: Iterable[TraceChain]) -> Iterator[TraceChain]:
    for number, chain in enumerate(chains, start=1):
        yield replace(chain, id=f"C{number}")


# -- bytes -----------------------------------------------------------------------------------------------------------------


def fastest_rate(work: Sequence[Work]) -> float | None:
    """Return the most bytes per nanosecond that any one pointwise kernel moved; None where no shapes were recorded."""
    best = 0.0
    moved: dict[tuple[str, int], int | None] = {}
    per_call = Counter(item.call for item in work)
    for item in work:
        if not item.inputs or item.duration_ns <= 0 or per_call[item.call] > 1:
            continue
        key = item.label, id(item.inputs)  # equal inputs are one object
        if key not in moved:
            moved[key] = moved_bytes(item.category, item.label, item.inputs)
        best = max(best, (moved[key] or 0) / item.duration_ns)
    return best or None


def _floors(sites: Iterable[Site]) -> list[int] | None:
    """Return each site's floor; None where one of them is not known."""
    known: dict[tuple[tuple[str, int], ...], int | None] = {}
    floors = []
    for site in sites:
        calls = [next(call) for _, call in itertools.groupby(site, key=lambda item: item.call)]
        key = tuple((item.label, id(item.inputs)) for item in calls)
        if key not in known:
            known[key] = floor_bytes([_op(item) for item in calls])
        floor = known[key]
        if floor is None:
            return None
        floors.append(floor)
    return floors


def _op(item: Work) -> tuple[str, str, Inputs]:
    return item.category, item.label, item.inputs


def _smallest_ns(work: Iterable[Work]) -> int:
    return min((item.duration_ns for item in work if item.is_fusible and item.duration_ns), default=0)


# -- sums ------------------------------------------------------------------------------------------------------------------


def ranked_kernels(rows: Iterable[tuple[str, str, str, int, int]], busy_ns: int) -> tuple[TraceKernel, ...]:
    """Sum rows of equal kernels.

    Args:
        rows: kernel name, op, category, count and nanoseconds of each.
        busy_ns: what shares are of.

    Returns:
        A row for each kernel, largest first.
    """
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for *words, more, more_ns in rows:
        name, op, category = words
        count, ns = sums.get((name, op, category), (0, 0))
        sums[name, op, category] = count + more, ns + more_ns
    return tuple(
        TraceKernel(name=name, op=op, category=category, count=count, device_ns=ns, share=ns / max(busy_ns, 1))
        for (name, op, category), (count, ns) in sorted(sums.items(), key=lambda row: -row[1][1])
    )


def summed_categories(rows: Iterable[tuple[str, int, int]]) -> tuple[tuple[str, int, int], ...]:
    """Sum count and nanoseconds of each category, largest first."""
    sums: dict[str, tuple[int, int]] = {}
    for name, more, more_ns in rows:
        count, ns = sums.get(name, (0, 0))
        sums[name] = count + more, ns + more_ns
    return tuple(sorted(((name, count, ns) for name, (count, ns) in sums.items()), key=lambda row: -row[2]))


def span_ns(work: Iterable[Work]) -> int:
    """Sum over the steps, and over what belongs to none, from the first start to the last end."""
    spans: dict[int, tuple[int, int]] = {}
    for step, items in itertools.groupby(work, key=operator.attrgetter("step")):
        own = list(items)
        start = min(item.start_ns for item in own)
        end = max(item.start_ns + item.duration_ns for item in own)
        first, last = spans.get(step, (start, end))
        spans[step] = min(first, start), max(last, end)
    return sum(end - start for start, end in spans.values())


def device_names(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a trace's GPUs, each once."""
    listed = facts.get("deviceProperties")
    names = [entry.get("name") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))


def _unknown(trace: Trace, *, has_shapes: bool, joined_share: float) -> Iterator[str]:
    yield (
        "whether one kernel may replace a chain: a trace shows neither which op reads what another wrote, nor who else reads it"
    )
    yield "modules and source lines"
    if has_shapes:
        yield "what ops write: bounds count what one kernel must read, and results whose shape follows from their inputs"
    else:
        yield "shapes and bytes, so what a chain could save at most (recorded without record_shapes=True)"
    if joined_share < 0.995:
        yield f"the op of {1 - joined_share:.1%} of the time (CUDA graphs record none): such kernels keep their own names"
    if not any(is_step(event) for event in trace.ranges):
        yield "steps (none are marked), so sites and times are those of the whole trace"
