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
    Fusion,
    GraphRewrite,
    Report,
    RewriteStage,
    Status,
    StepProfile,
    Timing,
)
from fusion_advisor.report import shared_rows
from fusion_advisor.report.escape import shortened, visible

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
"""At least 3:1 on the light and on the dark page, and distinguishable with the three kinds of colour blindness."""

IDLE = "url(#idle)"
"""Hatched, for it is no kernel's colour; the pattern is defined once in the page."""

WIDTH = 960
_LEFT = 96
_CHARACTER = 7.6
"""Width of one at the size of a bar's name, in the widest of the page's fonts: names of kernels took 7.5 each in DejaVu Sans."""
_LONGEST_NAME = 40
"""Characters of a row's name in the waterfall: more would leave its bars too little room."""


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
class Stage:
    """One row of the waterfall: a whole bar from zero, or the piece that a rewrite took off."""

    y: float
    name: str
    title: str
    """The name in full."""
    x: float
    width: float
    colour: str
    figure: str
    figure_x: float
    low: float
    high: float
    """Ends of the interval's whisker; equal where there is none."""
    joint: float
    """X of the line to the next row."""
    note: str
    """Why a removed rewrite took nothing; empty for the others."""


@dataclass(frozen=True, slots=True)
class Waterfall:
    """From the step without any rewrite to the step with all kept ones, closing exactly."""

    height: int
    left: int
    rows: tuple[Stage, ...]
    ticks: tuple[Tick, ...]
    table: tuple[tuple[str, str, str, str], ...]
    """(row, change, interval, step afterwards)."""


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
        busy = units.duration(step.device_ns)
        figure = f"{busy} of {units.duration(step.wall.median_ns)}" if step.wall else busy
        bars.append(Bar(26 + at * 52, labels[at], figure, round(x + 8, 2), tuple(segments)))
    legend = tuple((name, colour) for name, colour in COLOURS.items() if name in used)
    if any(idle_ns(step) for step in steps):
        legend += (("idle (wall time less kernel time)", IDLE),)
    return BarChart(26 + len(bars) * 52 + 24, left, tuple(bars), _ticks(longest, scale, left), legend)


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


def waterfall(report: Report) -> Waterfall | None:
    """Stack the measured changes between the captured step without and with the kept rewrites.

    Each change was measured on top of those before it, so they may be added; what the confirmation found beyond their sum is the
    last row. A CUDA graph is no part of it: it changes the wall time, and both ends are replays of one. None where the two ends
    were not timed.
    """
    before, after = report.step_before, report.step_after
    timed = [row for row in _in_order(report) if row.step_delta_ns is not None]
    if before is None or after is None or not timed:
        return None
    first, rest, last = "without rewrites", "all together, measured again", "with all kept"
    titles = [f"{row.id} {visible(row.kernel if isinstance(row, Fusion) else row.name, 120)}" for row in timed]
    left = _room_for([first, rest, last, *(shortened(title, _LONGEST_NAME) for title in titles)])
    level, lowest, highest = before.median_ns, 0, max(before.ci_high_ns, after.ci_high_ns)
    for row in timed:
        if row.status in _COUNTED:
            _, high = row.step_delta_ci_ns or (0, row.step_delta_ns or 0)
            highest = max(highest, level + high)
            level += row.step_delta_ns or 0
            highest, lowest = max(highest, level), min(lowest, level)
    level = before.median_ns
    scale = (WIDTH - left - 250) / max(highest - lowest, 1)

    def at(ns: float) -> float:
        return round(left + (ns - lowest) * scale, 2)

    rows: list[Stage] = []
    table: list[tuple[str, str, str, str]] = []

    def whole(name: str, timing: Timing) -> None:
        x, end, low, high = at(0), at(timing.median_ns), at(timing.ci_low_ns), at(timing.ci_high_ns)
        width, right, words = round(end - x, 2), max(end, high) + 8, units.duration(timing.median_ns)
        rows.append(Stage(_row_y(rows), name, name, x, width, COLOURS["gemm"], words, right, low, high, end, ""))
        table.append((name, "", units.duration_interval(timing.ci_low_ns, timing.ci_high_ns), words))

    def change(full: str, delta_ns: int, ci: tuple[int, int] | None, colour: str, note: str = "", *, counts: bool = True) -> None:
        nonlocal level
        start = level
        if counts:
            level += delta_ns
        x, width = min(at(start), at(level)), abs(at(start) - at(level))
        low, high = (at(level - delta_ns + end) for end in ci) if ci and counts else (at(level), at(level))
        figure = units.delta(delta_ns)
        right = max(at(start), at(level), high) + 8
        name = shortened(full, _LONGEST_NAME)
        rows.append(Stage(_row_y(rows), name, full, x, round(width, 2), colour, figure, right, low, high, at(level), note))
        table.append((full, figure, units.delta_interval(*ci) if ci else "", note or units.duration(level)))

    whole(first, before)
    for row, title in zip(timed, titles, strict=True):
        counts, delta_ns = row.status in _COUNTED, row.step_delta_ns or 0
        note = "" if row.status is Status.KEPT else shared_rows.VERDICTS[row.status].words
        colour = COLOURS["other"] if not counts else COLOURS["fused"] if delta_ns <= 0 else COLOURS["pointwise"]
        change(title, delta_ns, row.step_delta_ci_ns, colour, note, counts=counts)
    change(rest, after.median_ns - level, None, COLOURS["memory"])
    whole(last, after)
    ticks = tuple(Tick(at(ns), units.duration(ns) if ns else "0") for ns in round_values(min(lowest, 0), highest))
    return Waterfall(14 + len(rows) * 26 + 26, left, tuple(rows), ticks, tuple(table))


_COUNTED = (Status.KEPT, Status.ABSORBED)
"""What was in the step when the next row was timed: a fusion that a larger kernel took in later was."""


def _in_order(report: Report) -> list[Fusion | GraphRewrite]:
    """Rewrites and fusions in the order in which they were timed."""
    passes = [row for row in report.rewrites if row.stage is RewriteStage.PASS]
    chains = [row for row in report.fusions if row.chain_id]
    on_top = [row for row in report.rewrites if row.stage is RewriteStage.ON_TOP]
    return [*passes, *chains, *on_top, *(row for row in report.fusions if not row.chain_id)]


def _room_for(names: Sequence[str]) -> int:
    """Where bars begin so that the longest of their names, which end ten units before, lies within the chart."""
    return max(_LEFT, 20 + round(_CHARACTER * max(map(len, names))))


def _row_y(rows: list[Stage]) -> float:
    return 14 + len(rows) * 26


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
