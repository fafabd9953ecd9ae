"""The waterfall's drawing: rows of :mod:`fusion_advisor.report.waterfall_rows` as bars on one scale."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import Report
from fusion_advisor.report.escape import shortened
from fusion_advisor.report.html.charts import COLOURS, LABEL_SIZE, WIDTH, Tick, round_values
from fusion_advisor.report.html.text_width import text_width
from fusion_advisor.report.waterfall_rows import Row, rows

_LONGEST_NAME = 40
"""Characters of a row's name: more would leave its bars too little room."""
_PACE = 26
_TOP = 14


@dataclass(frozen=True, slots=True)
class Stage:
    """One row: a whole bar from zero, or the piece that came off or on."""

    y: float
    kind: str
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
    """Ends of the interval's whisker; equal where no interval was recorded."""
    joint: float
    """X of the line to the next row."""
    note: str


@dataclass(frozen=True, slots=True)
class Waterfall:
    """From the headline's step before to its step after, closing exactly."""

    height: int
    left: int
    rows: tuple[Stage, ...]
    ticks: tuple[Tick, ...]
    table: tuple[tuple[str, str, str, str, str], ...]
    """(row, change, interval, step afterwards, note)."""


def waterfall(report: Report) -> Waterfall | None:
    """Draw the rows; None where nothing was kept or timed."""
    found = rows(report)
    if not found:
        return None
    names = [shortened(row.name, _LONGEST_NAME) for row in found]
    words = [_figure(row) for row in found]
    left = 20 + round(max(text_width(name, LABEL_SIZE) for name in names))
    right = 20 + max(text_width(text, LABEL_SIZE, is_bold=True) for text in words)
    ends = [end for row in found for end in _ends(row)]
    lowest, highest = min(0, *ends), max(ends)
    scale = max(WIDTH - left - right, 120) / max(highest - lowest, 1)

    def at(ns: float) -> float:
        return round(left + (ns - lowest) * scale, 2)

    drawn = tuple(
        _stage(row, name, text, _TOP + place * _PACE, [at(end) for end in _bar(row)], [at(end) for end in _whisker(row)])
        for place, (row, name, text) in enumerate(zip(found, names, words, strict=True))
    )
    ticks = tuple(Tick(at(ns), units.duration(ns) if ns else "0") for ns in round_values(lowest, highest))
    return Waterfall(_TOP + len(drawn) * _PACE + 26, left, drawn, ticks, tuple(_cells(row) for row in found))


def _bar(row: Row) -> tuple[int, int]:
    """The bar's two ends in nanoseconds: where it begins, where the step stands after it."""
    if row.kind == "whole":
        return 0, row.level_ns
    return (row.level_ns, row.level_ns) if row.kind == "removed" else (row.level_ns - row.delta_ns, row.level_ns)


def _whisker(row: Row) -> tuple[int, int]:
    """The interval's two ends on the scale of the step; the bar's own end twice where none was recorded."""
    if row.ci_ns is None or row.kind == "removed":
        return row.level_ns, row.level_ns
    return row.ci_ns if row.kind == "whole" else (_bar(row)[0] + row.ci_ns[0], _bar(row)[0] + row.ci_ns[1])


def _ends(row: Row) -> tuple[int, ...]:
    return (*_bar(row), *_whisker(row))


def _figure(row: Row) -> str:
    if row.kind == "whole":
        return units.duration(row.level_ns)
    figure = units.delta(row.delta_ns)
    return f"{figure} · {row.note}" if row.note and row.kind != "other" else figure


def _stage(row: Row, name: str, figure: str, y: float, bar: list[float], whisker: list[float]) -> Stage:
    colours = {"whole": COLOURS["gemm"], "removed": COLOURS["other"], "other": COLOURS["memory"]}
    colour = colours.get(row.kind, COLOURS["fused" if row.delta_ns <= 0 else "pointwise"])
    x, width = min(bar), round(abs(bar[1] - bar[0]), 2)
    figure_x = round(max(*bar, *whisker) + 8, 2)
    low, high = (whisker[0], whisker[1]) if row.ci_ns is not None else (bar[1], bar[1])
    return Stage(y, row.kind, name, row.name, x, width, colour, figure, figure_x, low, high, bar[1], row.note)


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    level = "as before" if row.kind == "removed" else units.duration(row.level_ns)
    if row.kind == "whole":
        return row.name, "", units.duration_interval(*row.ci_ns) if row.ci_ns else "", level, row.note
    return row.name, units.delta(row.delta_ns), units.delta_interval(*row.ci_ns) if row.ci_ns else "", level, row.note
