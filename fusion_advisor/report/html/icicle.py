"""The icicle of modules: both traced steps on one scale, a row for each depth; a box leads to its branch of the list below it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import Report
from fusion_advisor.report.html.charts import COLOURS, LABEL_SIZE, TICK_SIZE, WIDTH, Tick, round_values
from fusion_advisor.report.html.text_width import fitted, text_width
from fusion_advisor.report.module_tree import Branch, layers, tree

DEPTH = 4
"""Rows of a side; deeper branches are in the list only."""
_ROW, _GAP = 30, 28
_LEAST_LINK = 24
"""Pixels: a narrower box cannot be pressed."""


@dataclass(frozen=True, slots=True)
class Box:
    """One branch on one side."""

    x: float
    y: float
    width: float
    colour: str
    label: str
    """Cut to the box by measure; empty where nothing fits."""
    title: str
    target: str
    """Anchor of its branch in the list; empty where the box is too narrow to be pressed."""


@dataclass(frozen=True, slots=True)
class Item:
    """One branch in the list, with its bars in percent of the longer step."""

    id: str
    name: str
    note: str
    anchor: str
    before: str
    after: str
    before_percent: float
    after_percent: float
    kind: str
    children: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Icicle:
    """The drawing and the list."""

    height: int
    captions: tuple[tuple[float, str], ...]
    boxes: tuple[Box, ...]
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class LayerBar:
    """One layer's pair of bars."""

    x: float
    width: float
    before_y: float
    after_y: float
    title: str
    label: str


@dataclass(frozen=True, slots=True)
class LayerChart:
    """Kernel time of the fused chains by layer."""

    height: int
    base: int
    bars: tuple[LayerBar, ...]
    ticks: tuple[Tick, ...]
    """Of the vertical axis: ``x`` is a y here."""
    rows: tuple[tuple[str, str, str], ...]
    """(layer, before, after)."""


def icicle(report: Report) -> Icicle | None:
    """Draw the tree; None where nothing was traced."""
    found = tree(report)
    if found is None:
        return None
    longest = max(found.before_ns, found.after_ns)
    scale = WIDTH / longest
    sides = [(found.before, found.before_ns, False)] + ([(found.after, found.after_ns, True)] if found.after else [])
    boxes, captions, top = [], [], 0.0
    for name, whole_ns, is_after in sides:
        captions.append((top + 16, f"{name}: {units.duration(whole_ns)} in kernels, one traced step"))
        drawn = list(_boxes(found.branches, 0.0, top + 24, scale, "m", is_after=is_after))
        boxes += drawn
        top = max(box.y for box in drawn) + _ROW + _GAP if drawn else top + 24 + _GAP
    items = tuple(_item(branch, f"m{at}", longest) for at, branch in enumerate(found.branches))
    return Icicle(round(top - _GAP + 4), tuple(captions), tuple(boxes), items)


def layer_chart(report: Report) -> LayerChart | None:
    """Draw the layers; None with fewer than two, or where nothing of them was fused."""
    found = layers(report)
    highest = max((max(before, after) for _, before, after in found), default=0)
    if not highest:
        return None
    left, base, tall = 76, 150, 130
    pace = (WIDTH - left) / len(found)
    every = next(step for step in (1, 2, 4, 8, 16, 10_000) if pace * step >= 12 + text_width("000", TICK_SIZE))
    bars = tuple(
        LayerBar(
            x=round(left + at * pace + pace * 0.1, 2),
            width=round(pace * 0.38, 2),
            before_y=round(base - before / highest * tall, 2),
            after_y=round(base - after / highest * tall, 2),
            title=f"layer {layer}: {units.duration(before)} → {units.duration(after)}",
            label=str(layer) if at % every == 0 else "",
        )
        for at, (layer, before, after) in enumerate(found)
    )
    ticks = tuple(
        Tick(round(base - ns / highest * tall, 2), units.duration(ns) if ns else "0") for ns in round_values(0, highest)
    )
    rows = tuple((str(layer), units.duration(before), units.duration(after)) for layer, before, after in found)
    return LayerChart(base + 24, base, bars, ticks, rows)


def _boxes(
    branches: tuple[Branch, ...], x: float, y: float, scale: float, prefix: str, *, is_after: bool, depth: int = 1
) -> Iterator[Box]:
    for at, branch in enumerate(branches):
        ns = (branch.after_ns or 0) if is_after else branch.before_ns
        width = ns * scale
        if width < 0.5:
            continue
        own = f"{prefix}{at}"
        title = f"{branch.name}: {units.duration(ns)}{f' ({branch.note})' if branch.note else ''}"
        target = own if width >= _LEAST_LINK else ""
        yield Box(
            round(x, 2), y, round(width, 2), _colour(branch, is_after=is_after), _label(branch, ns, width - 12), title, target
        )
        if depth < DEPTH:
            yield from _boxes(branch.children, x, y + _ROW, scale, f"{own}-", is_after=is_after, depth=depth + 1)
        x += width


def _label(branch: Branch, ns: int, room: float) -> str:
    """The longest of name and time, name, a kernel's id that fits; else the name cut, or nothing."""
    for words in (f"{branch.name} {units.duration(ns)}", branch.name, branch.name.split(" ")[0]):
        if text_width(words, LABEL_SIZE) <= room:
            return words
    return fitted(branch.name, room, LABEL_SIZE)


def _colour(branch: Branch, *, is_after: bool) -> str:
    if branch.kind in ("module", "chain"):
        return COLOURS["fused" if is_after else "pointwise"]
    return COLOURS.get(branch.kind, COLOURS["other"])


def _item(branch: Branch, own: str, longest: int) -> Item:
    return Item(
        id=own,
        name=branch.name,
        note=branch.note,
        anchor=branch.anchor,
        before=units.duration(branch.before_ns) if branch.before_ns else "–",
        after="–" if branch.after_ns is None else units.duration(branch.after_ns),
        before_percent=round(100 * branch.before_ns / longest, 2),
        after_percent=round(100 * (branch.after_ns or 0) / longest, 2),
        kind=branch.kind,
        children=tuple(_item(child, f"{own}-{at}", longest) for at, child in enumerate(branch.children)),
    )
