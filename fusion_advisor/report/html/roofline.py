"""The roofline: how close each fusion came to what this device can do, before and after.

Williams, Waterman, Patterson, "Roofline" (CACM 52, 2009). Operations are counted as one for each op and element, so the
horizontal place is a model; the height follows from it and the measured time of one site. The byte counts are the chain's: what
the ops by themselves read and write before, each outside value once after. Ceilings are measured in the same run; a datasheet's
is dotted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from fusion_advisor import units
from fusion_advisor.records import Bandwidth, Chain, Fusion, Report, Status
from fusion_advisor.report.escape import visible
from fusion_advisor.report.html.charts import COLOURS, LABEL_SIZE, WIDTH
from fusion_advisor.report.html.text_width import text_width

DATASHEET_BYTES_PER_S = {
    "NVIDIA H200": 4_800_000_000_000,
    "NVIDIA H100 80GB HBM3": 3_350_000_000_000,
    "NVIDIA H100 PCIe": 2_039_000_000_000,
    "NVIDIA A100-SXM4-80GB": 2_039_000_000_000,
    "NVIDIA A100-SXM4-40GB": 1_555_000_000_000,
}
"""Memory bandwidth by the device's name, from its maker's datasheet."""

_LEFT, _RIGHT, _TOP, _BASE = 92, 20, 16, 316


@dataclass(frozen=True, slots=True)
class Point:
    """One fusion's site: what it moved and how fast, on both sides."""

    id: str
    kernel: str
    is_kept: bool
    flops: int
    bytes_before: int
    bytes_after: int
    before_ns: int
    after_ns: int
    share_before: float
    """Bytes moved in a second over the measured ceiling."""
    share_after: float

    @property
    def is_above(self) -> bool:
        """Whether it beats the measured memory ceiling, which only a cache (or a wrong byte model) can explain."""
        return self.share_after > 1.0


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A line that no kernel crosses: (x1, y1) to (x2, y2)."""

    x1: float
    y1: float
    x2: float
    y2: float
    label: str
    is_measured: bool


@dataclass(frozen=True, slots=True)
class Arrow:
    """A fusion on the chart."""

    x1: float
    y1: float
    x2: float
    y2: float
    head: str
    """Points of the arrow's head."""
    label: str
    label_x: float
    label_y: float
    colour: str
    title: str
    leader: str = ""
    """Path from a label that had to move away to its arrow's head."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """The drawing, its figures and what is not in it."""

    height: int
    base: int
    left: int
    right: int
    top: int
    ceilings: tuple[Ceiling, ...]
    arrows: tuple[Arrow, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    points: tuple[Point, ...]
    left_out: tuple[str, ...]
    """Ids of fusions that were never timed."""


def memory_ceiling(bandwidth: Bandwidth) -> tuple[str, int]:
    """Return the fastest mix of reading and writing that was measured: its name and bytes a second."""
    measured = {
        "copy": bandwidth.copy_bytes_per_s,
        "read": bandwidth.read_bytes_per_s,
        "write": bandwidth.write_bytes_per_s,
        "triad": bandwidth.triad_bytes_per_s,
    }
    return max(measured.items(), key=lambda item: item[1])


def points(report: Report) -> tuple[Point, ...]:
    """Return the fusions whose site was timed on both sides."""
    chains = {chain.id: chain for chain in report.chains}
    return tuple(
        _point(report, fusion, chains[fusion.chain_id])
        for fusion in report.fusions
        if fusion.chain_before and fusion.chain_after and _is_known(chains.get(fusion.chain_id))
    )


def roofline(report: Report) -> Roofline | None:
    """Draw the timed fusions under the device's ceilings; None where none was timed."""
    # A figure of 0 has no place on a logarithmic scale.
    shown = tuple(p for p in points(report) if min(p.flops, p.bytes_before, p.bytes_after, p.before_ns, p.after_ns) > 0)
    if not shown:
        return None
    fastest, most = memory_ceiling(report.bandwidth)
    intensities = [point.flops / moved for point in shown for moved in (point.bytes_before, point.bytes_after)]
    speeds = [point.flops / ns * 1e9 for point in shown for ns in (point.before_ns, point.after_ns)]
    x_low, x_high = math.log10(min(intensities) / 1.6), math.log10(max(intensities) * 2.2)
    y_low, y_high = math.log10(min(speeds) / 2), math.log10(max(*speeds, most * max(intensities)) * 1.5)

    def at(intensity: float, speed: float) -> tuple[float, float]:
        x = _LEFT + (math.log10(intensity) - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)
        y = _BASE - (math.log10(speed) - y_low) / (y_high - y_low) * (_BASE - _TOP)
        return round(x, 1), round(y, 1)

    def ceiling(bytes_per_s: int, label: str, *, is_measured: bool) -> Ceiling:
        low = max(10.0**x_low, 10.0**y_low / bytes_per_s)
        high = min(10.0**x_high, 10.0**y_high / bytes_per_s)
        (x1, y1), (x2, y2) = at(low, low * bytes_per_s), at(high, high * bytes_per_s)
        return Ceiling(x1, y1, x2, y2, f"{label} {units.bandwidth(bytes_per_s)}", is_measured)

    lines = [ceiling(most, f"memory, measured in this run ({fastest}):", is_measured=True)]
    sheet = DATASHEET_BYTES_PER_S.get(report.environment.device_name)
    if sheet:
        lines.append(ceiling(sheet, "memory, datasheet:", is_measured=False))
    arrows = _labelled([_arrow(point, at) for point in shown])
    drawn = {point.id for point in shown}
    return Roofline(
        height=_BASE + 40,
        base=_BASE,
        left=_LEFT,
        right=WIDTH - _RIGHT,
        top=_TOP,
        ceilings=tuple(lines),
        arrows=arrows,
        x_ticks=tuple((at(value, 10.0**y_low)[0], f"{value:g}") for value in _ticks(x_low, x_high)),
        y_ticks=tuple((at(10.0**x_low, value)[1], _flops(value)) for value in _ticks(y_low, y_high)),
        points=shown,
        left_out=tuple(fusion.id for fusion in report.fusions if fusion.id not in drawn),
    )


def _is_known(chain: Chain | None) -> bool:
    if chain is None or not chain.sites:
        return False
    return min(chain.moved_bytes, chain.floor_bytes) >= chain.runs and math.prod(chain.shape) > 0


def _point(report: Report, fusion: Fusion, chain: Chain) -> Point:
    before, after = fusion.chain_before, fusion.chain_after
    assert before is not None and after is not None
    moved, floor = chain.moved_bytes // chain.runs, chain.floor_bytes // chain.runs
    ceiling = max(memory_ceiling(report.bandwidth)[1], 1)
    return Point(
        id=fusion.id,
        kernel=visible(fusion.kernel, 48),
        is_kept=fusion.status is Status.KEPT,
        flops=len(chain.ops) * math.prod(chain.shape),
        bytes_before=moved,
        bytes_after=floor,
        before_ns=max(before.median_ns, 1),
        after_ns=max(after.median_ns, 1),
        share_before=moved * 1e9 / max(before.median_ns, 1) / ceiling,
        share_after=floor * 1e9 / max(after.median_ns, 1) / ceiling,
    )


def _arrow(point: Point, at: Callable[[float, float], tuple[float, float]]) -> Arrow:
    x1, y1 = at(point.flops / point.bytes_before, point.flops / point.before_ns * 1e9)
    x2, y2 = at(point.flops / point.bytes_after, point.flops / point.after_ns * 1e9)
    angle = math.atan2(y2 - y1, x2 - x1)
    wings = [(x2 - 11 * math.cos(angle + turn), y2 - 11 * math.sin(angle + turn)) for turn in (-0.42, 0.42)]
    head = " ".join(f"{x:.1f},{y:.1f}" for x, y in ((x2, y2), *wings))
    title = (
        f"{point.id} {point.kernel}: {units.duration(point.before_ns)} → {units.duration(point.after_ns)} for one site, "
        f"{units.share(point.share_after)} of the measured ceiling"
    )
    colour = COLOURS["fused"] if point.is_kept else COLOURS["other"]
    mark = " ▲" if point.is_above else ""
    return Arrow(x1, y1, x2, y2, head, point.id + mark, x2 + 6, y2 + 16, colour, title)


_PLACES = ((6, 16), (6, -6), (-1, -10), (-1, 26), (6, 30), (6, -20), (-1, 40), (-1, -24), (6, 44), (6, -34))
"""Offsets of a label from its arrow's head, nearest first; -1 puts its end left of the head."""


def _labelled(arrows: list[Arrow]) -> tuple[Arrow, ...]:
    """Move each label to the nearest place that no other label or arrow's head covers; below all of them where none is free."""
    taken = [(arrow.x2 - 7, arrow.y2 - 7, arrow.x2 + 7, arrow.y2 + 7) for arrow in arrows]
    for arrow in arrows:
        for part in range(13):
            x, y = (start + (end - start) * part / 12 for start, end in ((arrow.x1, arrow.x2), (arrow.y1, arrow.y2)))
            taken.append((x - 4, y - 4, x + 4, y + 4))
    placed = []
    for arrow in arrows:
        wide = text_width(arrow.label, LABEL_SIZE, is_bold=True)
        spots = [(arrow.x2 + right if right > 0 else arrow.x2 - 8 - wide, arrow.y2 + down) for right, down in _PLACES]
        spots += [(arrow.x2 + right, arrow.y2 + 14 * step) for right in (30, 76, 122, -80, -126) for step in range(-12, 20)]
        inside = [spot for spot in spots if _LEFT < spot[0] < WIDTH - _RIGHT - wide and _TOP + 10 < spot[1] < _BASE - 4]
        boxes = [((x, y - 11, x + wide, y + 3), x, y) for x, y in inside or spots[:1]]
        box, x, y = next((one for one in boxes if not any(_overlap(one[0], other) for other in taken)), boxes[-1])
        taken.append(box)
        near = min(max(arrow.x2, x), x + wide), min(max(arrow.y2, y - 9), y)
        is_far = math.dist(near, (arrow.x2, arrow.y2)) > 24
        leader = f"M{near[0]:.1f} {near[1]:.1f}L{arrow.x2:.1f} {arrow.y2:.1f}" if is_far else ""
        placed.append(replace(arrow, label_x=round(x, 1), label_y=round(y, 1), leader=leader))
    return tuple(placed)


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _ticks(low: float, high: float) -> tuple[float, ...]:
    """Return 1, 2 and 5 of each decade between two logarithms; 1 alone where that would be many."""
    factors = (1, 2, 5) if high - low < 2.5 else (1,)
    exponents = range(math.floor(low), math.ceil(high) + 1)
    values = (float(f"{factor}e{exponent}") for exponent in exponents for factor in factors)
    return tuple(value for value in values if 10.0**low <= value <= 10.0**high)


def _flops(value: float) -> str:
    for scale, unit in ((1e15, "Pop/s"), (1e12, "Top/s"), (1e9, "Gop/s"), (1e6, "Mop/s")):
        if value >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g} op/s"
