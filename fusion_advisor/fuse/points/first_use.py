"""Attention that takes no plan for each new shape, near a point where a call is no slower with it.

What a plan costs shows in no time of a step: it is paid once for each shape, 45 to 50 ms on an H200's host, and a range has more
shapes than calls. A step on a growing KV cache has a new one at each token, so it takes no plans wherever it need not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.fuse.passes.flash_attention import FLASH
from fusion_advisor.fuse.plan.size_ranges import CACHED
from fusion_advisor.fuse.points.decide import Decided, RangeWork, checked, module_at, text_of, timed
from fusion_advisor.fuse.points.near_point import flashed
from fusion_advisor.fuse.points.time_graphs import time_graphs
from fusion_advisor.fuse.rewrite.record import PointRewrite
from fusion_advisor.fuse.shapes.sized_fusion import Workpiece
from fusion_advisor.records import Timing

Time = Callable[..., Sequence[Timing]]


def settled(
    work: RangeWork, workpiece: Workpiece, one: Decided, given: tuple[Any, ...], written: Written, *, time: Time = time_graphs,
    flash: PointRewrite = FLASH,
) -> Decided:  # fmt: skip
    """Check and time what runs near a point, with attention that takes no plans where that passes and is no slower.

    Args:
        work: on the piece's call.
        workpiece: the piece.
        one: the point, with rewrites.
        given: what the piece's graph is called with there.
        written: what such a call writes to.
        time: times graphs against each other, as :func:`time_graphs`.
        flash: puts flash attention in.

    Raises:
        LooksAtSizes: a graph pass took one size for all.
    """
    other = without_plans(work, workpiece, one, given, written, time=time, flash=flash)
    if other is not None:
        found = checked(work, workpiece, other, given)
        if not found.row.reason:
            work.progress.note(f"{flash.title} at {text_of(one.served.sizes)}")
            return timed(work, workpiece, found)
    return timed(work, workpiece, checked(work, workpiece, one, given))


def without_plans(
    work: RangeWork, workpiece: Workpiece, one: Decided, given: tuple[Any, ...], written: Written, *, time: Time,
    flash: PointRewrite,
) -> Decided | None:  # fmt: skip
    """Return the point with flash attention; None where it has that, no call would change, or the graph would be slower.

    Parameters are those of :func:`settled`.
    """
    options = work.options
    if flash.id in one.row.passes or options.exact or not options.wants(flash.id):
        return None
    served = flashed(workpiece, one.served, flash)
    if served is None:
        return None
    if options.is_timed and not workpiece.opened.symbols_of(CACHED):
        ways = [module_at(workpiece, either).forward for either in (one.served, served)]
        before, after = time(work, workpiece.opened, ways, given, written, budget_s=work.budget_s / 2)
        if after.ci_low_ns > before.ci_high_ns:
            return None
    row = replace(one.row, passes=(*one.row.passes, flash.id), rewrites=(*one.row.rewrites, flash.id))
    return replace(one, served=served, row=row, is_right_elsewhere=False)
