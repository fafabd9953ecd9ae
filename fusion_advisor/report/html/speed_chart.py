"""The chart of ``--shapes``: the speed-up at each point over the product of its sizes, with the line at 1.

A filled dot is a point at which rewrites run, a hollow one where the original ops do although rewrites were timed. Whiskers are
the interval of the ratio, cut off where they leave the chart. Numbers are those of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import ShapeRanges
from fusion_advisor.report.escape import shortened, visible
from fusion_advisor.report.html.charts import COLOURS, LABEL_SIZE, TICK_SIZE, WIDTH
from fusion_advisor.report.html.text_width import text_width
from fusion_advisor.report.shapes import sentences
from fusion_advisor.report.shapes.rows import CallRows, PointRow, call_rows
from fusion_advisor.timing.paired import Comparison

_LEFT, _RIGHT, _TOP, _BASE = 72, 24, 30, 270
_TONES = {"gain": "fused", "loss": "pointwise"}
"""Colours of points where rewrites run and are clearly on one side; all others are grey."""
_ROOM = 0.25
"""Of the span of the ratios: how far whiskers may go beyond them."""


@dataclass(frozen=True, slots=True)
class Dot:
    """One point."""

    x: float
    y: float
    low_y: float
    high_y: float
    """Ends of the whisker; equal where no interval is known."""
    label: str
    label_x: float
    label_y: float
    colour: str
    is_served: bool
    title: str


@dataclass(frozen=True, slots=True)
class Crossing:
    """A vertical line where ours and eager are equally fast."""

    x: float
    label: str
    label_x: float
    anchor: str


@dataclass(frozen=True, slots=True)
class SpeedChart:
    """The drawing."""

    height: int
    left: int
    right: int
    top: int
    base: int
    even: float
    """Y of the line at 1."""
    dots: tuple[Dot, ...]
    crossings: tuple[Crossing, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    axis: str
    """What the horizontal axis counts."""
    call: str = ""
    """The step of ``generate``; empty for calls like the example's."""


def speed_charts(shapes: ShapeRanges) -> tuple[SpeedChart, ...]:
    """Draw the timed points, one chart for each way to call the model with a timed point."""
    return tuple(chart for chart in map(_speed_chart, call_rows(shapes)) if chart is not None)


def _speed_chart(call: CallRows) -> SpeedChart | None:
    points = [(row, row.compared) for row in call.points if row.compared and row.elements > 0 and _is_drawable(row.compared)]
    if not points:
        return None
    ratios = [found.ratio for _, found in points]
    low, high = min(1.0, *ratios), max(1.0, *ratios)
    room = max(high - low, 0.1) * _ROOM
    low, high = max(0.0, low - room), high + room
    ends = [math.log10(row.elements) for row, _ in points]
    first, last = min(ends) - 0.15, max(ends) + 0.15

    def at_x(elements: float) -> float:
        return round(_LEFT + (math.log10(elements) - first) / (last - first) * (WIDTH - _LEFT - _RIGHT), 1)

    def at_y(ratio: float) -> float:
        inside = min(max(ratio, low), high)
        return round(_BASE - (inside - low) / (high - low) * (_BASE - _TOP), 1)

    crossings = sentences.crossovers([row for row, _ in points])
    return SpeedChart(
        height=_BASE + 42,
        left=_LEFT,
        right=WIDTH - _RIGHT,
        top=_TOP,
        base=_BASE,
        even=at_y(1.0),
        dots=_dots(points, at_x, at_y),
        crossings=tuple(_crossing(one.elements, at_x(one.elements)) for one in crossings),
        x_ticks=_x_ticks(first, last, at_x),
        y_ticks=tuple((at_y(ratio), units.speedup(ratio)) for ratio in _ratios(low, high) if ratio != 1.0),
        axis=shortened(visible(call.volume), 60),
        call=visible(call.call),
    )


def _is_drawable(found: Comparison) -> bool:
    return all(math.isfinite(value) and value > 0 for value in (found.ratio, found.ratio_low, found.ratio_high))


def _dots(
    points: Sequence[tuple[PointRow, Comparison]], at_x: Callable[[float], float], at_y: Callable[[float], float]
) -> tuple[Dot, ...]:
    """Place the points, and each number where no dot, whisker or other number stands."""
    places = [(at_x(row.elements), at_y(found.ratio)) for row, found in points]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in places]
    taken += [
        (x - 2, at_y(found.ratio_high), x + 2, at_y(found.ratio_low)) for (x, _), (_, found) in zip(places, points, strict=True)
    ]
    taken.append((_LEFT, at_y(1.0) - 1, WIDTH - _RIGHT, at_y(1.0) + 1))
    dots = []
    for (row, found), (x, y) in zip(points, places, strict=True):
        label = str(row.number)
        wide = text_width(label, LABEL_SIZE, is_bold=True)
        spots = [(x + 8, y + 4), (x - 8 - wide, y + 4)]
        spots += [(x + right, y + 4 + 15 * down) for down in (-1, 1, -2, 2, -3, 3) for right in (8, -8 - wide, 26, -26 - wide)]
        inside = [spot for spot in spots if _LEFT < spot[0] < WIDTH - _RIGHT - wide and _TOP + 10 < spot[1] < _BASE - 2] or spots[
            :1
        ]
        boxes = [((left, base - 11, left + wide, base + 3), left, base) for left, base in inside]
        box, label_x, label_y = next((one for one in boxes if not any(_overlap(one[0], other) for other in taken)), boxes[-1])
        taken.append(box)
        dots.append(
            Dot(
                x, y, at_y(found.ratio_low), at_y(found.ratio_high), label, round(label_x, 1), round(label_y, 1),
                COLOURS[_TONES.get(row.tone, "other")],
                row.is_served, f"{row.number}: {row.sizes}: {row.speedup} {row.spread}, {row.outcome}",
            )
        )  # fmt: skip
    return tuple(dots)


def _crossing(elements: float, x: float) -> Crossing:
    label = f"even at about {sentences.rounded(elements)}"
    is_left = x + 6 + text_width(label, TICK_SIZE) > WIDTH - _RIGHT
    return Crossing(x, label, x - 6 if is_left else x + 6, "end" if is_left else "start")


def _x_ticks(first: float, last: float, at_x: Callable[[float], float]) -> tuple[tuple[float, str], ...]:
    """Whole numbers at 1, 2 and 5 of each decade; at 1 alone where that would be many."""
    factors = (1, 2, 5) if last - first < 3.5 else (1,)
    values = [
        factor * 10**exponent for exponent in range(math.floor(first) + (first < 0), math.ceil(last) + 1) for factor in factors
    ]
    return tuple((at_x(value), units.number(value)) for value in values if 10.0**first <= value <= 10.0**last)


def _ratios(low: float, high: float) -> tuple[float, ...]:
    """Round ratios between two ends, about five of them, 1 among them."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    pace = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return tuple(round(1.0 + step * pace, 9) for step in range(math.ceil((low - 1) / pace), math.floor((high - 1) / pace) + 1))


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
