"""What a report says about ranges of sizes: what is served, where the original ops run, and where the gain ends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import ShapePoint, ShapeRanges
from fusion_advisor.report.shapes.rows import PointRow, call_rows, is_served, piece_rows, point_rows, range_words, size_count
from fusion_advisor.timing.host_timer import CPU_TIME
from fusion_advisor.timing.paired import compare_rounds

OUTSIDE = (
    "A call outside these ranges, or one that differs from the example in anything but the named sizes, runs the original ops. "
    "A warning gives the reason, once."
)
_EVENTS = "cuda_events"
NEAREST = (
    "Each exact shape is looked up once. It runs what stays at the nearest point of its piece: by the product of the sizes first."
)


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where ours and eager are equally fast, between two points that are clearly on either side."""

    elements: float
    """Product of the sizes."""
    is_faster_above: bool


def summary(shapes: ShapeRanges) -> str:
    """Return one sentence for the first screen, without its full stop."""
    where, points = range_words(shapes.asked), point_rows(shapes)
    served = [point for point in points if point.is_served]
    if not served:
        return f"serves no other size: in {where} the original ops run"
    refused = sum(not is_served(piece) for piece in shapes.pieces)
    rest = f"; the original ops run in {refused} of {_count(len(shapes.pieces), 'piece')}" if refused else ""
    left = len(points) - len(served)
    of = f"{len(served)} of {_count(len(points), 'point')}" if left else _count(len(points), "point")
    ratios = [point.compared.ratio for point in served if point.compared is not None]
    if not ratios:
        return f"serves {where}: checked at {of}, not timed{rest}"
    low, high = (units.speedup(one)[:-1] for one in (min(ratios), max(ratios)))
    speed = low if low == high else f"{low} to {high}"
    return f"serves {where}: {speed} times as fast as eager at {of}{_launches(shapes)}{rest}"


def _launches(shapes: ShapeRanges) -> str:
    """Return at how many points the times are of launches, on a device that has CUDA graphs."""
    timed = [point for piece in shapes.pieces for point in piece.points if point.ours is not None and not point.reason]
    launched = [point for point in timed if _is_launched(point)]
    if not launched:
        return ""
    return ", launch by launch" if len(launched) == len(timed) else f", {len(launched)} of them launch by launch"


def _is_launched(point: ShapePoint) -> bool:
    """Whether a point was timed without a CUDA graph on a device that has them."""
    return point.ours is not None and point.ours.method == _EVENTS and not point.in_segments and not point.in_graph


def left_to_original_ops(shapes: ShapeRanges) -> tuple[str, ...]:
    """Return a sentence for each piece, or part of one, in which the original ops run."""
    points = {point.number: point for point in point_rows(shapes)}
    lines = []
    for piece in piece_rows(shapes):
        own = [points[number] for number in piece.points]
        if piece.refusal:
            lines.append(f"{piece.sizes} ({_sizes(piece.count)}): the original ops run. {_reason(piece.refusal)}")
        elif all(not point.is_served for point in own):
            why = " ".join(dict.fromkeys(_reason(point.reason) for point in own))
            lines.append(f"{piece.sizes} ({_sizes(piece.count)}): the original ops run. {why}")
        else:
            near = [point for point in own if not point.is_served]
            lines += [f"Near {point.sizes}, in {piece.sizes}: the original ops run. {_reason(point.reason)}" for point in near]
    return tuple(lines)


def carried_line(shapes: ShapeRanges) -> str:
    """Return which points took over the rewrites of which, and what was done there; empty where none did."""
    places: dict[int, list[int]] = {}
    rows = iter(point_rows(shapes))
    for piece in shapes.pieces:
        numbers = {point.sizes: next(rows).number for point in piece.points}
        for point in piece.points:
            if point.carried_from in numbers and not point.reason:
                places.setdefault(numbers[point.carried_from], []).append(numbers[point.sizes])
    if not places:
        return ""
    taken = "; ".join(f"{_points(own)} from point {source}" for source, own in places.items())
    return (
        f"Rewrites were carried over with --quick: to {taken}. There each kernel and the whole graph were checked and the call "
        "was timed; what else might pay was not tried."
    )


def _points(numbers: Sequence[int]) -> str:
    return f"point{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def share_line(shapes: ShapeRanges) -> str:
    """Return how many of the sizes lie in pieces with rewrites."""
    served = [piece for piece in shapes.pieces if is_served(piece)]
    asked = sum(size_count(piece.ranges) for piece in shapes.pieces)
    inside = sum(size_count(piece.ranges) for piece in served)
    part = f"All {_sizes(asked)}" if inside == asked else f"{units.number(inside)} of {_sizes(asked)}"
    return f"{part} lie in {_count(len(served), 'piece')} with rewrites, one graph each." if served else ""


def dims_line(shapes: ShapeRanges) -> str:
    """Return which dims of the call's tensors the names stand for."""
    tensors = [f"{path} ({', '.join(name or 'fixed' for name in names)})" for path, names in shapes.dims]
    return f"Named dims: {'; '.join(tensors)}." if tensors else ""


def cost_line(shapes: ShapeRanges) -> str:
    """Return what it took."""
    return f"Tracing, deciding and building took {units.seconds(shapes.seconds)}." if shapes.seconds else ""


def general_line(shapes: ShapeRanges) -> str:
    """Return what serving ranges costs at the example's sizes; empty where it was not timed."""
    if shapes.exact is None or shapes.general is None or not shapes.exact.times_ns or not shapes.general.times_ns:
        return ""
    found = compare_rounds(shapes.general.times_ns, shapes.exact.times_ns)
    general, exact = units.duration(shapes.general.median_ns), units.duration(shapes.exact.median_ns)
    spread = units.speedup_interval(found.ratio_low, found.ratio_high)
    how = "In CUDA graphs" if shapes.is_replayed else "Launch by launch"
    return (
        f"{how}, at the example's sizes the plan of the range takes {general} and the plan of exactly these sizes {exact}: "
        f"{units.speedup(found.ratio)} as long {spread}. Calls of these sizes run the latter."
    )


def clock_line(shapes: ShapeRanges) -> str:
    """Return how the points were timed; empty where none was."""
    methods = {point.ours.method for piece in shapes.pieces for point in piece.points if point.ours is not None}
    if not methods:
        return ""
    clock = "GPU time" if _EVENTS in methods else "CPU time" if CPU_TIME in methods else "wall time"
    numbers = [at + 1 for at, point in enumerate(point for piece in shapes.pieces for point in piece.points) if point.in_graph]
    replays = f" Ours at {_points(numbers)}: replays of one CUDA graph. A size's first call is launched kernel by kernel."
    return f"Medians of interleaved calls ({clock}); 95% intervals in brackets.{replays if numbers else ''}"


def crossovers(points: Sequence[PointRow]) -> tuple[Crossover, ...]:
    """Return where the speed-up passes 1 from one side clearly to the other, in the order of the product of the sizes.

    A point whose interval holds 1 is on neither side. Where points of one product disagree there is no crossover at it.
    """
    sides: dict[int, list[tuple[float, bool]]] = {}
    for point in points:
        found = point.compared
        if found is not None and point.elements > 0 and (found.ratio_low > 1 or found.ratio_high < 1):
            sides.setdefault(point.elements, []).append((found.ratio, found.ratio > 1))
    clear = [
        (elements, math.exp(sum(math.log(ratio) for ratio, _ in found) / len(found)), found[0][1])
        for elements, found in sorted(sides.items())
        if len({is_faster for _, is_faster in found}) == 1 and min(ratio for ratio, _ in found) > 0
    ]
    lines = []
    for (left, before, _), (right, after, is_faster) in itertools.pairwise(clear):
        if (before > 1) != (after > 1):
            part = math.log(before) / (math.log(before) - math.log(after))
            lines.append(Crossover(left * (right / left) ** part, is_faster))
    return tuple(lines)


def crossover_line(shapes: ShapeRanges) -> str:
    """Return where the gain begins or ends; empty where the points show no such place."""
    lines = []
    for call in call_rows(shapes):
        words = [
            f"{'faster' if one.is_faster_above else 'slower'} than eager from about {rounded(one.elements)} on"
            for one in crossovers(call.points)
        ]
        place = f"In {call.call}, by" if call.call else "By"
        lines += [f"{place} {call.volume}, the rewrites are {', '.join(words)} (between timed points)."] if words else []
    return " ".join(lines)


def rounded(value: float) -> str:
    """``1,200``: two digits, for a place that is read off between points."""
    if value < 1:
        return "1"
    power = max(0, math.floor(math.log10(value)) - 1)
    return units.number(round(value / 10**power) * 10**power)


def _reason(text: str) -> str:
    """Return a reason as a sentence."""
    whole = text.strip().rstrip(".")
    return f"{whole[:1].upper()}{whole[1:]}." if whole else "No reason was recorded."


def _sizes(count: int) -> str:
    return _count(count, "size")


def _count(count: int, one: str) -> str:
    return f"{count:,} {one}{'' if count == 1 else 's'}"
