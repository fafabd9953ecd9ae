"""Draws what a training step holds over its time: one panel for each step, all on one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import StepMemory
from fusion_advisor.report.training.step_rows import KINDS

_LEFT, _RIGHT, _PANEL, _GAP, _TOP = 76, 12, 150, 44, 22
_TICKS = 4


@dataclass(frozen=True, slots=True)
class Area:
    """What one kind of memory takes, as a polygon on top of the kinds before it."""

    points: tuple[tuple[float, float], ...]
    colour: str
    title: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One step.

    Attributes:
        caption: which step, and its peak.
        caption_y: of the caption.
        areas: from the base upwards.
        top: of the panel.
        base: of the panel.
        backward_x: where the backward pass begins.
        peak_x: where most is held.
        peak_y: how high that is.
    """

    caption: str
    caption_y: float
    areas: tuple[Area, ...]
    top: float
    base: float
    backward_x: float
    peak_x: float
    peak_y: float


@dataclass(frozen=True, slots=True)
class MemoryChart:
    """All panels; ``ticks`` are (y, label) of the horizontal lines of all of them."""

    height: int
    left: int
    right: int
    panels: tuple[Panel, ...]
    ticks: tuple[tuple[float, str], ...]
    legend: tuple[tuple[str, str], ...]


def memory_chart(memory: Sequence[StepMemory], *, width: int, colours: Mapping[str, str]) -> MemoryChart | None:
    """Draw the steps, one below the other; None where there is none.

    Args:
        memory: of each step.
        width: of the drawing.
        colours: of the three kinds.
    """
    most = max((one.peak_bytes for one in memory), default=0)
    if not most:
        return None
    right = width - _RIGHT
    panels, ticks = [], []
    for number, one in enumerate(memory):
        top = _TOP + number * (_PANEL + _GAP)
        base = top + _PANEL
        panels.append(_panel(one, top, base, right, most, colours))
        ticks += [
            (round(base - _PANEL * part / _TICKS, 1), units.size(most * part / _TICKS) if part else "0")
            for part in range(_TICKS + 1)
        ]
    height = _TOP + len(memory) * (_PANEL + _GAP)
    return MemoryChart(
        height=height, left=_LEFT, right=right, panels=tuple(panels), ticks=tuple(ticks),
        legend=tuple((name, colours[kind]) for kind, name in KINDS.items()),
    )  # fmt: skip


def _panel(one: StepMemory, top: int, base: int, right: int, most: int, colours: Mapping[str, str]) -> Panel:
    def x(share: float) -> float:
        return round(_LEFT + share * (right - _LEFT), 1)

    def y(held_bytes: float) -> float:
        return round(base - held_bytes / most * (base - top), 1)

    below = [0] * len(one.at_share)
    areas = []
    for kind, name in KINDS.items():
        column = {"activation": one.activation_bytes, "gradient": one.gradient_bytes, "working": one.working_bytes}[kind]
        above = [low + own for low, own in zip(below, column, strict=True)]
        edge = [(x(share), y(held)) for share, held in zip(one.at_share, above, strict=True)]
        back = [(x(share), y(held)) for share, held in zip(one.at_share, below, strict=True)]
        areas.append(Area((*edge, *reversed(back)), colours[kind], f"{name}: at most {units.size(max(column))}"))
        below = above
    return Panel(
        caption=f"{one.label}: at most {units.size(one.peak_bytes)}", caption_y=top - 8, areas=tuple(areas), top=top, base=base,
        backward_x=x(one.backward_share), peak_x=x(one.peak_share), peak_y=y(one.peak_bytes),
    )  # fmt: skip
