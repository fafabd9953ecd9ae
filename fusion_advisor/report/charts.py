"""Chart geometry: records in, positions out. The SVG itself is drawn by jinja macros with presentation attributes.

Style attributes would be blocked by the page's own content security policy, and a chart library would be larger than the report.
Text never lies on a coloured fill: labels stand above or beside the bars.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import Chain, Fusion, GraphRewrite, Report, Timing
from fusion_advisor.report import view
from fusion_advisor.report.text import visible

COLOURS = {
    "gemm": "#838ddf",
    "attention": "#ac56ff",
    "convolution": "#2b8fa3",
    "pointwise": "#c22927",
    "reduction": "#d47d00",
    "memory": "#706062",
    "fused": "#08a962",
    "other": "#7d8590",
}
"""At least 3:1 on the light and on the dark page, and apart from each other for the three kinds of colour blindness."""

WIDTH = 960
_LEFT = 96
_RIGHT = 110


@dataclass(frozen=True, slots=True)
class Segment:
    """A coloured part of a bar."""

    x: float
    width: float
    colour: str
    title: str
    label: str
    """Shown above the segment; empty where it would not fit."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar with its name on the left and its figure on the right."""

    y: float
    name: str
    figure: str
    figure_x: float
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of the axis."""

    x: float
    label: str


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars on one scale."""

    height: int
    left: int
    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]
    legend: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Interval:
    """A point with its interval."""

    y: float
    name: str
    low: float
    mid: float
    high: float
    figure: str
    colour: str


@dataclass(frozen=True, slots=True)
class IntervalChart:
    """Points with intervals round a zero line."""

    height: int
    left: int
    zero: float
    rows: tuple[Interval, ...]
    ticks: tuple[Tick, ...]


@dataclass(frozen=True, slots=True)
class Strip:
    """Every run of one thing as a dot, with median and interval."""

    y: float
    name: str
    dots: tuple[tuple[float, float], ...]
    median: float
    low: float
    high: float
    figure: str


@dataclass(frozen=True, slots=True)
class StripChart:
    """Strips on one scale that starts at zero."""

    height: int
    left: int
    strips: tuple[Strip, ...]
    ticks: tuple[Tick, ...]


def where_time_went(report: Report) -> BarChart | None:
    """Kernel time by category for each profiled step; None where no step has any."""
    steps = [step for step in view.steps(report) if step.categories]
    longest = max((sum(ns for _, _, ns in step.categories) for step in steps), default=0)
    if not longest:
        return None
    scale = (WIDTH - _LEFT - _RIGHT) / longest
    bars, used = [], []
    for at, step in enumerate(steps):
        x, segments = float(_LEFT), []
        for name, count, ns in step.categories:
            width = ns * scale
            label = colour_name(name) if width > 60 else ""
            title = f"{visible(name, 40)}: {units.duration(ns)} in {count:,} kernels"
            segments.append(Segment(round(x, 2), round(width, 2), _colour(name), title, label))
            used.append(colour_name(name))
            x += width
        total = sum(ns for _, _, ns in step.categories)
        bars.append(Bar(26 + at * 52, step.label, units.duration(total), round(x + 8, 2), tuple(segments)))
    legend = tuple((name, colour) for name, colour in COLOURS.items() if name in used)
    return BarChart(26 + len(bars) * 52 + 24, _LEFT, tuple(bars), _ticks(longest, scale), legend)


def chain_floors(report: Report, limit: int = 12) -> BarChart | None:
    """For each chain: the part of its time that no kernel can save, and the part that one might."""
    chains = report.chains[:limit]
    longest = max((chain.device_ns for chain in chains), default=0)
    if not longest:
        return None
    left = 56
    scale = (WIDTH - left - 210) / longest
    bars = []
    for at, chain in enumerate(chains):
        floor = min(chain.floor_ns, chain.device_ns) * scale
        rest = chain.device_ns * scale - floor
        segments = (
            Segment(left, round(floor, 2), COLOURS["memory"], f"{chain.id} floor: {units.duration(chain.floor_ns)}", ""),
            Segment(
                round(left + floor, 2),
                round(rest, 2),
                COLOURS["reduction" if chain.is_reduction else "pointwise"],
                _save_title(chain),
                "",
            ),
        )
        save = f"save ≤ {units.duration(chain.saving_bound_ns)}" if chain.saving_bound_ns > 0 else "at its floor"
        figure = f"{units.duration(chain.device_ns)}, {save}"
        bars.append(Bar(8 + at * 24, chain.id, figure, round(left + chain.device_ns * scale + 8, 2), segments))
    legend = (
        ("floor: cannot be saved", COLOURS["memory"]),
        ("above the floor, pointwise", COLOURS["pointwise"]),
        ("above the floor, reduction", COLOURS["reduction"]),
    )
    return BarChart(8 + len(bars) * 24 + 26, left, tuple(bars), _ticks(longest, scale, left), legend)


def step_gains(report: Report) -> IntervalChart | None:
    """What each timed rewrite did to the step, with its interval; None where nothing was timed."""
    tried: list[Fusion | GraphRewrite] = [*report.rewrites, *report.fusions]
    timed = [row for row in tried if row.step_delta_ns is not None]
    if not timed:
        return None
    ends = [0]
    for row in timed:
        ends += [row.step_delta_ns or 0, *(row.step_delta_ci_ns or ())]
    low, high = min(ends), max(ends)
    left = 210
    span = max(high - low, 1)
    scale = (WIDTH - left - 150) / span

    def at(ns: int) -> float:
        return round(left + (ns - low) * scale, 2)

    rows = []
    for index, row in enumerate(timed):
        mid = row.step_delta_ns or 0
        ci = row.step_delta_ci_ns or (mid, mid)
        name = row.kernel if isinstance(row, Fusion) else row.name
        colour = COLOURS["fused"] if row.status.value == "kept" else COLOURS["other"]
        rows.append(
            Interval(18 + index * 26, f"{row.id} {visible(name, 22)}", at(ci[0]), at(mid), at(ci[1]), units.delta(mid), colour)
        )
    ticks = tuple(Tick(at(ns), units.delta(ns) if ns else "0") for ns in round_values(low, high))
    return IntervalChart(18 + len(rows) * 26 + 22, left, at(0), tuple(rows), ticks)


def timing_strips(before: Timing | None, after: Timing | None) -> StripChart | None:
    """Every run of one site's ops, before and after, from zero."""
    pairs = [(name, timing) for name, timing in (("original", before), ("fused", after)) if timing is not None]
    longest = max((max((*timing.times_ns, timing.ci_high_ns)) for _, timing in pairs), default=0)
    if not longest:
        return None
    left = 80
    scale = (WIDTH - left - 130) / longest
    strips = []
    for at, (name, timing) in enumerate(pairs):
        y = 18 + at * 34
        shown = timing.times_ns[:400]
        dots = tuple((round(left + ns * scale, 2), round(y + 6 * math.sin(2.4 * i), 2)) for i, ns in enumerate(shown))
        ends = [round(left + ns * scale, 2) for ns in (timing.median_ns, timing.ci_low_ns, timing.ci_high_ns)]
        strips.append(Strip(y, name, dots, ends[0], ends[1], ends[2], units.duration(timing.median_ns)))
    return StripChart(18 + len(strips) * 34 + 14, left, tuple(strips), _ticks(longest, scale, left))


def _save_title(chain: Chain) -> str:
    return f"{chain.id} saving: at most {units.duration(max(chain.saving_bound_ns, 0))}"


def colour_name(category: str) -> str:
    """Return the category whose colour is used: itself, or ``other``."""
    return category if category in COLOURS else "other"


def _colour(category: str) -> str:
    return COLOURS[colour_name(category)]


def _ticks(longest: int, scale: float, left: int = _LEFT) -> tuple[Tick, ...]:
    return tuple(Tick(round(left + ns * scale, 2), units.duration(ns) if ns else "0") for ns in round_values(0, longest))


def round_values(low: int, high: int) -> tuple[int, ...]:
    """Round numbers between two ends, about five of them, zero among them where it lies between."""
    span = max(high - low, 1)
    raw = span / 5
    power = 10 ** math.floor(math.log10(raw)) if raw >= 1 else 1
    pace = next((int(factor * power) for factor in (1, 2, 5, 10) if factor * power >= raw), 1)
    first = math.ceil(low / pace) * pace
    return tuple(range(first, high + 1, max(pace, 1)))
