"""The timeline strip: which kernel ran when, before and after, on one scale.

The page holds each side twice. A drawing of 600 columns is there for readers without scripts, for print and as the first paint;
the kernels themselves lie in the page as three planes of numbers, deflated, which a canvas draws at any zoom. 100,000 kernels are
12 MB as table rows and half a megabyte that way.
"""

from __future__ import annotations

import base64
import itertools
import zlib
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fusion_advisor import units
from fusion_advisor.records import Report, StepProfile, Timeline
from fusion_advisor.report import shared_rows
from fusion_advisor.report.escape import plural, visible
from fusion_advisor.report.html.charts import COLOURS, Tick, colour_name, round_values
from fusion_advisor.report.html.module_lanes import Span, spans

COLUMNS = 600
HEIGHT = 48
MAX_KERNELS = 200_000
"""Kernels of one side that the canvas gets; beyond that, each category's time in :data:`BINS` columns."""
BINS = 4096
_MAX_NAMES = 65_535

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Side:
    """One step's strip."""

    label: str
    caption: str
    width: float
    """Columns that the step takes; the rest of the scale is empty."""
    paths: tuple[tuple[str, str], ...]
    """(colour, SVG path) of each category."""
    spans: tuple[Span, ...]
    """Modules by level; empty where the report does not tell them."""
    data: dict[str, object]
    """The canvas data: names, and the deflated planes in base64."""


@dataclass(frozen=True, slots=True)
class Strips:
    """All sides on one scale."""

    sides: tuple[Side, ...]
    ticks: tuple[Tick, ...]
    legend: tuple[tuple[str, str], ...]
    span_ns: int
    note: str
    """The parts left out, in words; empty if none."""


def strips(report: Report) -> Strips | None:
    """Draw every side whose timeline was kept; None where none was."""
    sides = [
        (step, unprofiled(step, step.timeline))
        for step in shared_rows.steps(report)
        if step.timeline is not None and step.timeline.kernel and step is not report.captured
    ]
    if shared_rows.is_unchanged(report):
        sides = sides[:1]
    span_ns = max((_end_ns(timeline) for _, timeline in sides), default=0)
    if span_ns <= 0:
        return None
    used = {colour_name(step.kernels[at][1]) for step, timeline in sides for at in set(timeline.kernel)}
    binned = [step.label for step, timeline in sides if len(timeline.kernel) > MAX_KERNELS]
    note = (
        f"{', '.join(binned)}: more than {MAX_KERNELS:,} kernels, so each category's time in {BINS:,} columns is drawn instead."
        if binned
        else ""
    )
    return Strips(
        sides=tuple(
            _side(step, timeline, span_ns, spans(report, timeline) if step is report.after else ()) for step, timeline in sides
        ),
        ticks=tuple(Tick(round(ns / span_ns * COLUMNS, 2), units.duration(ns) if ns else "0") for ns in round_values(0, span_ns)),
        legend=tuple((name, colour) for name, colour in COLOURS.items() if name in used),
        span_ns=span_ns,
        note=note,
    )


def unprofiled(step: StepProfile, timeline: Timeline) -> Timeline:
    """Return the timeline with its idle time scaled, so that it is as long as the step without a profiler.

    The profiler slows the host: traced, our step may end after torch.compile's where it ends first otherwise. Kernels keep their
    durations unless they alone take longer than the whole step does; then everything is scaled. A step without a wall time stays
    as traced.
    """
    traced_ns, wall_ns = _end_ns(timeline), step.wall.median_ns if step.wall is not None else 0
    if wall_ns <= 0 or traced_ns <= 0:
        return timeline
    start, duration = _int64(timeline.start_ns), _int64(timeline.duration_ns)
    reached = np.maximum.accumulate(np.concatenate(([0], (start + duration)[:-1])))
    gap = np.maximum(start - reached, 0)
    idle_ns = int(gap.sum())
    busy_ns = traced_ns - idle_ns
    if busy_ns < wall_ns and idle_ns:
        factor = (wall_ns - busy_ns) / idle_ns
        moved = start + np.rint((factor - 1) * np.cumsum(gap)).astype(np.int64)
        return replace(timeline, start_ns=tuple(moved.tolist()))
    factor = wall_ns / traced_ns
    scaled = [tuple(np.rint(plane * factor).astype(np.int64).tolist()) for plane in (start, duration)]
    return replace(timeline, start_ns=scaled[0], duration_ns=scaled[1])


def _side(step: StepProfile, timeline: Timeline, span_ns: int, modules: tuple[Span, ...]) -> Side:
    start, duration = _int64(timeline.start_ns), _int64(timeline.duration_ns)
    categories = [colour_name(row[1]) for row in step.kernels]
    kinds = sorted(set(categories), key=list(COLOURS).index)
    kind = np.array([kinds.index(name) for name in categories], dtype=np.int64)[_int64(timeline.kernel)]
    own_ns = _end_ns(timeline)
    columns = _busy(start, duration, kind, len(kinds), np.linspace(0, span_ns, COLUMNS + 1))
    if len(start) <= MAX_KERNELS:
        names = [[visible(name, 160), category] for (name, *_), category in zip(step.kernels, categories, strict=True)]
        planes = _planes(start, duration, np.minimum(_int64(timeline.kernel), _MAX_NAMES))
        names = [*names[:_MAX_NAMES], ["one of the other kernels", "other"]] if len(names) > _MAX_NAMES else names
    else:
        edges = np.linspace(0, own_ns, BINS + 1)
        names = [[f"{name} in this column", name] for name in kinds]
        planes = _planes(*_as_events(_busy(start, duration, kind, len(kinds), edges), edges))
    return Side(
        label=step.label,
        caption=_caption(step, len(start), own_ns),
        width=round(own_ns / span_ns * COLUMNS, 2),
        paths=tuple((COLOURS[name], path) for name, path in zip(kinds, _paths(columns), strict=True) if path),
        spans=modules,
        data={"label": step.label, "kernels": names, "planes": planes, "end_ns": own_ns},
    )


def _caption(step: StepProfile, kernels: int, own_ns: int) -> str:
    """Name the strip's length and how it was measured."""
    traced_ns = _end_ns(step.timeline) if step.timeline is not None else own_ns
    how = "as traced: its un-profiled time is not known" if step.wall is None else f"traced {units.duration(traced_ns)}, scaled"
    return f"{step.label}: {plural(kernels, 'kernel')} in {units.duration(own_ns)} ({how})"


def _busy(start: Numbers, duration: Numbers, kind: Numbers, kinds: int, edges: npt.NDArray[np.float64]) -> Numbers:
    """Return (kind, column) nanoseconds in which kernels of a kind ran, and as the last row the columns' own widths.

    What ran before t is the sum over kernels of (t − start) for those begun, less (t − end) for those ended: two sorted sums,
    so a million kernels take no loop.
    """
    at = edges.astype(np.int64)
    rows = []
    for wanted in range(kinds):
        chosen = kind == wanted
        begun, ended = np.sort(start[chosen]), np.sort(start[chosen] + duration[chosen])
        rows.append(np.diff(_elapsed(begun, at) - _elapsed(ended, at)))
    return np.stack([*rows, np.diff(at)])


def _elapsed(moments: Numbers, at: Numbers) -> Numbers:
    count = np.searchsorted(moments, at, side="right")
    total = np.concatenate(([0], np.cumsum(moments)))
    return np.asarray(count * at - total[count], dtype=np.int64)


def _paths(columns: Numbers) -> list[str]:
    """Return one path for each kind: stacked boxes, a run of equal columns in one box."""
    *rows, width = columns
    # kernels on two streams may fill a column more than once
    scale = HEIGHT / np.maximum(np.maximum(np.sum(rows, axis=0), width), 1)
    tops = np.rint(HEIGHT - np.cumsum([row * scale for row in rows], axis=0)).astype(int)
    paths = []
    floor = np.full(len(width), HEIGHT)
    for top in tops:
        changes = np.flatnonzero(np.diff(top) | np.diff(floor)) + 1
        bounds = [0, *changes.tolist(), len(top)]
        boxes = [
            f"M{left} {top[left]}h{right - left}v{floor[left] - top[left]}h-{right - left}z"
            for left, right in itertools.pairwise(bounds)
            if floor[left] > top[left]
        ]
        paths.append("".join(boxes))
        floor = top
    return paths


def _as_events(columns: Numbers, edges: npt.NDArray[np.float64]) -> tuple[Numbers, Numbers, Numbers]:
    """Turn each column's sums into one stretch for each kind, one after the other."""
    busy = columns[:-1].T
    start = edges[:-1, None].astype(np.int64) + np.cumsum(busy, axis=1) - busy
    kind = np.broadcast_to(np.arange(busy.shape[1]), busy.shape)
    chosen = busy > 0
    order = np.argsort(start[chosen], kind="stable")
    return start[chosen][order], busy[chosen][order], kind[chosen][order]


def _planes(start: Numbers, duration: Numbers, index: Numbers) -> str:
    """Return base64 of the deflated planes: u32 nanoseconds since the start before, u32 nanoseconds long, u16 name."""
    since = np.diff(start, prepend=0)
    top = np.iinfo(np.uint32).max
    times = [np.clip(plane, 0, top).astype("<u4").tobytes() for plane in (since, duration)]
    raw = b"".join((*times, index.astype("<u2").tobytes()))
    packer = zlib.compressobj(level=6, wbits=-15)
    return base64.b64encode(packer.compress(raw) + packer.flush()).decode("ascii")


def _int64(values: tuple[int, ...]) -> Numbers:
    return np.array(values, dtype=np.int64)


def _end_ns(timeline: Timeline) -> int:
    if not timeline.kernel:
        return 0
    return int((_int64(timeline.start_ns) + _int64(timeline.duration_ns)).max())
