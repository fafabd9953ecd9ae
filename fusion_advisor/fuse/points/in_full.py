"""One point of a piece, decided in full: what pays there is found and fitted to all sizes of the piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion_advisor.fuse.points.decide import Decided, RangeWork, fusion_row, not_decided, text_of
from fusion_advisor.fuse.points.first_use import settled
from fusion_advisor.fuse.points.near_point import finished
from fusion_advisor.fuse.points.time_limit import WatchedProgress
from fusion_advisor.fuse.shapes.decide_at import decide_at
from fusion_advisor.fuse.shapes.layouts import open_layouts
from fusion_advisor.fuse.shapes.sized_fusion import Workpiece, all_sized, build
from fusion_advisor.records import RenderedKernel, ShapePoint


def decided(
    work: RangeWork, workpiece: Workpiece, sizes: dict[str, int], changes: Sequence[str], kernels: dict[str, RenderedKernel]
) -> Decided:
    """Decide one point of a piece.

    Args:
        work: on the piece's call.
        workpiece: the piece.
        sizes: of the point.
        changes: of the piece's layouts.
        kernels: gets the kernels by name.

    Raises:
        LooksAtSizes: a graph pass took one size for all.
        OutOfTime: the time for ranges was over before all rewrites were tried.
    """
    where = tuple(sizes.items())
    given, written = work.graph_call(workpiece.opened, sizes)
    work.progress.note(f"at {text_of(sizes)}")
    left_out = work.refused | workpiece.by_one_size
    found = decide_at(
        workpiece.opened, given, work.options, work.bandwidth, work.instruments, WatchedProgress(work.limit),
        budget_s=work.budget_s, only=lambda name: name not in left_out, written=written, ahead=work.ahead, passed=work.passed,
    )  # fmt: skip
    fusions, dropped = all_sized(workpiece, found.fusions)
    refused = *found.refused, *(name for name in open_layouts() if name in work.refused)
    dropped += [(name, "it decides by one size") for name in refused]
    if not fusions and not found.passes and not changes:
        nothing = not_decided(sizes, "nothing that serves other sizes was kept near these")
        return replace(nothing, row=replace(nothing.row, dropped=tuple(dropped)))
    module = build(workpiece, fusions, found.passes)
    served = finished(workpiece, module, sizes, found.passes)
    kernels.update({fusion.kernel.name: fusion.kernel for fusion in fusions})
    names = tuple(dict.fromkeys((*(fusion.planned.match.kernel for fusion in fusions), *found.passes, *changes)))
    row = ShapePoint(
        sizes=where, rewrites=names, fusions=tuple(map(fusion_row, fusions)), passes=found.passes, dropped=tuple(dropped)
    )
    written.restore()
    one = Decided(served=served, row=row, fusions=tuple(fusions))
    return settled(work, workpiece, one, given, written)
