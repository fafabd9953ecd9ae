"""Launch gaps: how long the device stood idle between kernels, and whether it waited for the host.

A gap lies between the end of everything that ran before and the next kernel's start. It is the host's where the call that
launched the next kernel returned only after the device had fallen idle (the split follows Holistic Trace Analysis); otherwise
the kernel was queued in time and waited for the device itself.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from fusion_advisor.records import Report, StepProfile
from fusion_advisor.report import shared_rows
from fusion_advisor.report.html.charts import COLOURS, WIDTH

EDGES_NS = (500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)


@dataclass(frozen=True, slots=True)
class GapRow:
    """One step's gaps."""

    label: str
    launches: int
    gaps: int
    idle_ns: int
    host_ns: int | None
    """Idle while the launching call had not returned; None where no calls were seen."""
    queued_ns: int | None
    median_kernel_ns: int
    median_call_ns: int | None
    short_share: float | None
    """Share of kernels that are shorter than the call that launched them."""
    counts: tuple[int, ...]
    """Gaps by length: one more than there are :data:`EDGES_NS`."""


@dataclass(frozen=True, slots=True)
class Column:
    """One bar of the histogram."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str


@dataclass(frozen=True, slots=True)
class Histogram:
    """Gaps by length, the steps side by side."""

    height: int
    base: int
    columns: tuple[Column, ...]
    labels: tuple[tuple[float, str], ...]
    counts: tuple[tuple[float, str], ...]
    """Horizontal grid: (y, number)."""
    legend: tuple[tuple[str, str], ...]


def gap_rows(report: Report) -> tuple[GapRow, ...]:
    """Return the gaps of each side whose timeline was kept; nothing for a CPU, where an op is its own launch."""
    if report.environment.device_kind == "cpu":
        return ()
    shown = [step for step in shared_rows.steps(report) if step is not report.captured and step.timeline and step.timeline.kernel]
    return tuple(_row(step) for step in (shown[:1] if shared_rows.is_unchanged(report) else shown))


def bin_names() -> tuple[str, ...]:
    """Name the histogram's bins: ``below 0.5 µs``, ``0.5–1 µs`` … ``over 1 ms``."""
    ends = [f"{edge / 1000:g}" for edge in EDGES_NS]
    between = [f"{low}–{high} µs" for low, high in itertools.pairwise(ends)]
    return (f"below {ends[0]} µs", *between, f"over {ends[-1]} µs")


def histogram(rows: tuple[GapRow, ...]) -> Histogram | None:
    """Draw the rows' gaps by length; None where there is none."""
    most = max((count for row in rows for count in row.counts), default=0)
    if not most:
        return None
    left, base, top = 64, 190, 14
    slot = (WIDTH - left - 10) / (len(EDGES_NS) + 1)
    thick = slot * 0.8 / len(rows)
    pace = _pace(most)
    ceiling = max(pace * math.ceil(most / pace), 1)
    colours = (COLOURS["other"], COLOURS["fused"], COLOURS["gemm"])
    columns, names = [], bin_names()
    for side, row in enumerate(rows):
        for at, count in enumerate(row.counts):
            height = count / ceiling * (base - top)
            title = f"{row.label}, {names[at]}: {count:,} gaps"
            x = left + at * slot + slot * 0.1 + side * thick
            box = round(x, 1), round(base - height, 1), round(thick, 1), round(height, 1)
            columns.append(Column(*box, colours[side % 3], title))
    labels = tuple((round(left + (at + 1) * slot, 1), f"{edge / 1000:g} µs") for at, edge in enumerate(EDGES_NS))
    grid = tuple((round(base - n / ceiling * (base - top), 1), f"{n:,}") for n in range(0, ceiling + 1, pace))
    legend = tuple((row.label, colours[at % 3]) for at, row in enumerate(rows))
    return Histogram(base + 24, base, tuple(columns), labels, grid, legend)


def _row(step: StepProfile) -> GapRow:
    timeline = step.timeline
    assert timeline is not None
    start, length = np.array(timeline.start_ns, dtype=np.int64), np.array(timeline.duration_ns, dtype=np.int64)
    idle_from = np.maximum.accumulate(start + length)[:-1]
    gap = np.maximum(start[1:] - idle_from, 0)
    counts = np.bincount(np.searchsorted(EDGES_NS, gap[gap > 0], side="right"), minlength=len(EDGES_NS) + 1)
    host_ns = queued_ns = median_call_ns = short_share = None
    if timeline.call_ns:
        call_start, call = np.array(timeline.call_start_ns, dtype=np.int64), np.array(timeline.call_ns, dtype=np.int64)
        is_host = (call_start + call)[1:] > idle_from
        host_ns, queued_ns = int(gap[is_host].sum()), int(gap[~is_host].sum())
        median_call_ns, short_share = int(np.median(call)), float((length < call).mean())
    return GapRow(
        label=step.label,
        launches=len(start),
        gaps=int((gap > 0).sum()),
        idle_ns=int(gap.sum()),
        host_ns=host_ns,
        queued_ns=queued_ns,
        median_kernel_ns=int(np.median(length)),
        median_call_ns=median_call_ns,
        short_share=short_share,
        counts=tuple(int(count) for count in counts),
    )


def _pace(most: int) -> int:
    power = 10 ** math.floor(math.log10(max(most / 4, 1)))
    return int(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= most / 4))
