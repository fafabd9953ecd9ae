"""Attention without what a call does not need near a point: a mask that hides nothing, and a plan for each new shape.

Calls whose masks hold ones alone get a graph without them, and attention the kernel that takes no plans (:func:`may_stay`). What
a plan costs shows in no time of a step: it is paid once for each shape, 45 to 50 ms on an H200's host, and a range has more
shapes than calls. A step on a growing KV cache has a new one at each token, so there both stay untimed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter_ns
from typing import Any

from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.fuse.dependence.masks_of_ones import SKIP_MASKS
from fusion_advisor.fuse.passes.flash_attention import FLASH, use_flash
from fusion_advisor.fuse.plan.size_ranges import CACHED
from fusion_advisor.fuse.points.decide import Decided, RangeWork, checked, module_at, text_of, timed
from fusion_advisor.fuse.points.near_point import PutFlash, flashed, without_masks
from fusion_advisor.fuse.points.time_graphs import time_graphs
from fusion_advisor.fuse.rewrite.record import PointRewrite
from fusion_advisor.fuse.shapes.pieces import Served, hold_ones
from fusion_advisor.fuse.shapes.sized_fusion import Workpiece
from fusion_advisor.records import Timing

Time = Callable[..., Sequence[Timing]]


def settled(
    work: RangeWork, workpiece: Workpiece, one: Decided, given: tuple[Any, ...], written: Written, *, time: Time = time_graphs,
    flash: PutFlash = use_flash,
) -> Decided:  # fmt: skip
    """Check and time what runs near a point, with attention that needs less where that passes and is no slower.

    Args:
        work: on the piece's call.
        workpiece: the piece.
        one: the point, with rewrites.
        given: what the piece's graph is called with there.
        written: what such a call writes to.
        time: times graphs against each other, as :func:`time_graphs`.
        flash: puts flash attention into a graph.

    Raises:
        LooksAtSizes: a graph pass took one size for all.
    """
    ways = [one]
    changes: list[tuple[PointRewrite, Callable[[Served], Served | None]]] = [
        (SKIP_MASKS, lambda served: _for_masks_of(without_masks(workpiece, served), given)),
        (FLASH, lambda served: flashed(workpiece, served, flash)),
    ]
    for rewrite, change in changes:
        before = ways[-1]
        after = _with(work, before, rewrite, change)
        if after is not None and _may_stay(work, workpiece, rewrite, before, after, given, written, time):
            ways.append(after)
    for way in reversed(ways):
        found = _checked(work, workpiece, way, given)
        if not found.row.reason or way is one:
            break
    for name in found.row.passes:
        if name not in one.row.passes:
            work.progress.note(f"{name} at {text_of(one.served.sizes)}")
    return timed(work, workpiece, found, given)


def _checked(work: RangeWork, workpiece: Workpiece, one: Decided, given: tuple[Any, ...]) -> Decided:
    """Check what runs near a point, and where no other sizes show the graph for other masks, that one too."""
    found = checked(work, workpiece, one, given)
    if one.served.unmasked is None or found.row.reason or found.is_right_elsewhere:
        return found
    masked = checked(work, workpiece, replace(one, served=replace(one.served, unmasked=None, masks=())), given)
    return one.refused(masked.row.reason) if masked.row.reason else found


def _for_masks_of(served: Served | None, given: Sequence[Any]) -> Served | None:
    """Return what has a graph for masks of ones where a call's are such; None where it would stay unseen."""
    return served if served is not None and hold_ones(given, served.masks) else None


def _with(work: RangeWork, one: Decided, rewrite: PointRewrite, change: Callable[[Served], Served | None]) -> Decided | None:
    """Return a point with a rewrite; None where it has that, does not want it, or no call would change."""
    if rewrite.id in one.row.passes or work.options.exact or not work.options.wants(rewrite.id):
        return None
    served = change(one.served)
    if served is None:
        return None
    row = replace(one.row, passes=(*one.row.passes, rewrite.id), rewrites=(*one.row.rewrites, rewrite.id))
    return replace(one, served=served, row=row, is_right_elsewhere=False)


def _may_stay(
    work: RangeWork, workpiece: Workpiece, rewrite: PointRewrite, before: Decided, after: Decided, given: tuple[Any, ...],
    written: Written, time: Time,
) -> bool:  # fmt: skip
    """Whether a rewrite may stay by its times; growing steps, and all of a run without times, are not timed."""
    if not work.options.is_timed or workpiece.opened.symbols_of(CACHED):
        return True
    ways = [module_at(workpiece, either.served, given).forward for either in (before, after)]
    first, second = time(work, workpiece.opened, ways, given, written, budget_s=work.budget_s / 2)
    look_ns = time_of_a_look(given, after.served.masks) if rewrite is SKIP_MASKS else None
    return may_stay(first, second, look_ns, is_of_generate=bool(work.ranged.name))


def time_of_a_look(given: Sequence[Any], masks: Sequence[int]) -> int:
    """Return the nanoseconds that it takes to look at masks: each call does, whatever they hold.

    Args:
        given: what a graph is called with.
        masks: their places.
    """
    taken = []
    for _ in range(_LOOKS):
        started = perf_counter_ns()
        hold_ones(given, masks)
        taken.append(perf_counter_ns() - started)
    return int(median(taken))


def may_stay(before: Timing, after: Timing, look_ns: int | None, *, is_of_generate: bool) -> bool:
    """Whether a rewrite may stay.

    Attention that takes no plans: where a call is no slower. A graph without masks: where a call with its look at them is faster,
    for others, whose masks hide something, look in vain. In steps of ``generate`` the look may cost a tenth of the call: each
    prompt is a new shape, and nearly all of them come without padding.

    Args:
        before: a call's times without it.
        after: with it.
        look_ns: a look at the masks takes; None where no call looks.
        is_of_generate: the call is a step of ``generate``.
    """
    if look_ns is None:
        return after.ci_low_ns <= before.ci_high_ns
    if is_of_generate:
        return after.ci_low_ns + look_ns <= before.ci_high_ns * (1 + _MOST_SLOWER)
    return after.ci_high_ns + look_ns < before.ci_low_ns


_LOOKS = 9
_MOST_SLOWER = 0.1
