"""Which changes of layouts a piece gets: its graph is the same at all of its points, so they decide together.

Chains are found on the changed graph. The change is therefore timed ahead of them, on the graph as it was captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from torch.fx import GraphModule

from fusion_advisor import units
from fusion_advisor.capture.graph.op_records import SizeNumbers
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.capture.sizes.open_capture import OpenCapture, Sizes
from fusion_advisor.fuse.passes.registry import PASSES
from fusion_advisor.fuse.points.decide import RangeWork, text_of
from fusion_advisor.fuse.points.real_layouts import laid_otherwise
from fusion_advisor.fuse.points.time_graphs import time_graphs
from fusion_advisor.fuse.rewrite.record import LayoutRewrite
from fusion_advisor.fuse.shapes.layouts import changed_region, open_layouts
from fusion_advisor.fuse.shapes.pieces import Piece

_TIMED = "time a change of layouts"


def choose_layouts(
    work: RangeWork, piece: Piece, points: Sequence[Sizes], rewrites: Iterable[LayoutRewrite] | None = None
) -> list[str]:  # fmt: skip
    """Change a piece's graph where that pays; return the ids of the changes.

    A prefill reads the logits of one token, the example call those of all: what a change brings there says nothing of it here.
    Qwen2.5-7B of 4 layers spends a quarter of a prefill on rows of its last layer that nobody reads.

    Args:
        work: on the piece's call.
        piece: with its graph, which is changed.
        points: sizes of the piece.
        rewrites: the changes; None: all that there are.

    Raises:
        LooksAtSizes: a change took one size for all; this graph must not be used any more.
    """
    opened, found = piece.opened, []
    assert opened is not None
    for rewrite in open_layouts().values() if rewrites is None else rewrites:
        is_as_example = rewrite.serves_other_shapes and rewrite.id in work.kept
        if rewrite.id in work.refused or not (is_as_example or _may_be_tried(work, rewrite)):
            continue
        region = changed_region(opened, rewrite, piece.box)
        if region is None or (rewrite.id in PASSES and not _lies_as_traced(work, opened, region, points[0], rewrite)):
            continue
        if is_as_example or not work.options.is_timed or _pays(work, opened, region, points, rewrite):
            opened.live.regions[0] = region
            found.append(rewrite.id)
    return found


def _may_be_tried(work: RangeWork, rewrite: LayoutRewrite) -> bool:
    """Whether a change may be tried that the example call does not have.

    Where --quick is to spare time, that call's answer is taken for linears to merge. A step on a static cache, which
    CUDA graphs serve, has its own: no other call is as little held up by the host.
    """
    is_known = work.options.effort == "quick" and rewrite.serves_other_shapes and not work.ranged.may_pad
    is_exact = work.options.exact  # GEMMs of other sizes add in another order
    return work.options.wants(rewrite.id) and not is_known and not is_exact


def _lies_as_traced(work: RangeWork, opened: OpenCapture, region: Region, sizes: Sizes, rewrite: LayoutRewrite) -> bool:
    """Whether results of a graph with copies lie as torch traces them, wherever those of the graph without them do."""
    number = SizeNumbers(opened.symbols(sizes))

    def others(graph: GraphModule) -> list[str]:
        given, written = work.graph_call(opened, sizes)
        found = laid_otherwise(graph, number, given)
        written.restore()
        return found

    found = others(region.graph)
    new = {*found}.difference(others(opened.region.graph)) if found else set()
    if new:
        work.progress.note(f"{rewrite.title}: left out, for {min(new, key=found.index)} lies otherwise than torch traces it")
    return not new


def _pays(work: RangeWork, opened: OpenCapture, region: Region, points: Sequence[Sizes], rewrite: LayoutRewrite) -> bool:
    """Whether a change saves time at one point at least, and over all points together."""
    if not work.limit.has_room_for(_TIMED):
        return False
    with work.limit.spent_on(_TIMED):
        ways, budget_s = (opened.region.graph.forward, region.graph.forward), work.budget_s / len(points)
        given = [work.graph_call(opened, sizes) for sizes in points]
        times = [time_graphs(work, opened, ways, values, written, budget_s=budget_s) for values, written in given]
    gains = [before.median_ns / after.median_ns for before, after in times]
    is_clear = any(after.ci_high_ns < before.ci_low_ns * (1 - work.options.min_gain) for before, after in times)
    is_kept = is_clear and prod(gains) > 1
    where = "; ".join(f"{units.speedup(gain)} at {text_of(sizes)}" for gain, sizes in zip(gains, points, strict=True))
    work.progress.note(f"{rewrite.title}, as captured: {where}: {'kept' if is_kept else 'left out'}")
    return is_kept
