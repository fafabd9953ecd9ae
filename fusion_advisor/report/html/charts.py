"""Chart geometry: records in, positions out. The SVG itself is drawn by jinja macros with presentation attributes.

Style attributes would be blocked by the page's own content security policy, and a chart library would be larger than the report.
Text never overlaps a coloured fill: labels are above or next to the bars.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import (
    COMPILED,
    Chain,
    Report,
    StepProfile,
    Timing,
)
from fusion_advisor.report import shared_rows
from fusion_advisor.report.escape import visible
from fusion_advisor.report.html.text_width import text_width

COLOURS = {
    "gemm": "#838ddf",
    "attention": "#ac56ff",
    "convolution": "#2b8fa3",
    "pointwise": "#c22927",
    "reduction": "#d47d00",
    "memory": "#706062",
    "collective": "#b0519a",
    "fused": "#08a962",
    "other": "#7d8590",
}
"""At least 3:1 on the light and on the dark page, and distinguishable with the three kinds of colour blindness."""

IDLE = "url(#idle)"
"""Hatched, for it is no kernel's colour; the pattern is defined once in the page."""

WIDTH = 960
_LEFT = 96
LABEL_SIZE, TICK_SIZE = 12.5, 11.5
"""Of a chart's text, in its own units: names and figures, and marks of its axes."""


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
    """Kernel time by category for each profiled step, and what of its wall time no kernel filled; None where there is none."""
    steps = [step for step in shared_rows.steps(report) if step.categories]
    longest = max((step.device_ns + idle_ns(step) for step in steps), default=0)
    if not longest:
        return None
    labels = [step.label.replace(COMPILED, "compile ") for step in steps]
    left = _room_for(labels)
    scale = (WIDTH - left - 170) / longest
    bars, used = [], []
    for at, step in enumerate(steps):
        x, segments = float(left), []
        for name, count, ns in step.categories:
            width = ns * scale
            label = colour_name(name) if width > 60 else ""
            title = f"{visible(name, 40)}: {units.duration(ns)} in {count:,} kernels"
            segments.append(Segment(round(x, 2), round(width, 2), _colour(name), title, label))
            used.append(colour_name(name))
            x += width
        idle = idle_ns(step)
        if idle:
            width = idle * scale
            title = f"idle: {units.duration(idle)} of wall time that no kernel filled"
            segments.append(Segment(round(x, 2), round(width, 2), IDLE, title, "idle" if width > 60 else ""))
            x += width
        bars.append(Bar(26 + at * 52, labels[at], _busy_of_step(step), round(x + 8, 2), tuple(segments)))
    legend = tuple((name, colour) for name, colour in COLOURS.items() if name in used)
    if any(idle_ns(step) for step in steps):
        legend += (("idle (un-profiled step less traced kernel time)", IDLE),)
    return BarChart(26 + len(bars) * 52 + 24, left, tuple(bars), _ticks(longest, scale, left), legend)


def _busy_of_step(step: StepProfile) -> str:
    """Kernel time and the un-profiled step's time; a trace that took longer than that step is no part of it, and says so."""
    busy = units.duration(step.device_ns)
    if step.wall is None:
        return busy
    return f"{busy} of {units.duration(step.wall.median_ns)}" if step.device_ns <= step.wall.median_ns else f"{busy} (traced)"


def idle_ns(step: StepProfile) -> int:
    """Wall time of the un-profiled step less its kernel time; 0 where kernels overlap or the profiler drew them out."""
    return max(0, step.wall.median_ns - step.device_ns) if step.wall else 0


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


def _room_for(names: Sequence[str]) -> int:
    """Where bars begin so that the longest of their names, which end ten units before, lies within the chart."""
    return max(_LEFT, 20 + round(max(text_width(name, LABEL_SIZE) for name in names)))


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
