"""Which changes of layouts a piece gets: its graph is the same at all of its points, so they decide together.

Chains are found on the changed graph. The change is therefore timed ahead of them, on the graph as it was captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from fusion_advisor import units
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.capture.sizes.one_size import at_one_size
from fusion_advisor.capture.sizes.open_capture import OpenCapture, Sizes
from fusion_advisor.fuse.decide.session import Bench, step_of
from fusion_advisor.fuse.decide.step_runner import StepRunner
from fusion_advisor.fuse.passes.registry import LAYOUT_CHANGES
from fusion_advisor.fuse.points.decide import RangeWork, text_of
from fusion_advisor.fuse.rewrite.record import LayoutRewrite
from fusion_advisor.fuse.shapes.layouts import changed_region
from fusion_advisor.fuse.shapes.time_calls import time_calls
from fusion_advisor.records import Timing
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.wall_timer import as_timing

_ROUNDS = 20
_TIMED = "time a change of layouts"


def choose_layouts(work: RangeWork, opened: OpenCapture, points: Sequence[Sizes]) -> list[str]:
    """Change a piece's graph where that pays; return the ids of the changes.

    A prefill reads the logits of one token, the example call those of all: what a change brings there says nothing of it here.
    Qwen2.5-7B of 4 layers spends a quarter of a prefill on rows of its last layer that nobody reads.

    Args:
        work: on the piece's call.
        opened: the piece's graph; changed.
        points: sizes of the piece.

    Raises:
        LooksAtSizes: a change took one size for all; this graph must not be used any more.
    """
    found = []
    for rewrite in LAYOUT_CHANGES.values():
        is_as_example = rewrite.serves_other_shapes and rewrite.id in work.kept
        if rewrite.id in work.refused or not (is_as_example or _may_be_tried(work, rewrite)):
            continue
        region = changed_region(opened, rewrite)
        if region is not None and (is_as_example or not work.options.is_timed or _pays(work, opened, region, points, rewrite)):
            opened.live.regions[0] = region
            found.append(rewrite.id)
    return found


def _may_be_tried(work: RangeWork, rewrite: LayoutRewrite) -> bool:
    """Whether a change may be tried that the example call does not have.

    Where --quick is to spare time, that call's answer is taken for linears to merge. A CUDA graph has its own: no other call
    is as little held up by the host.
    """
    is_known = work.options.effort == "quick" and rewrite.serves_other_shapes and not work.ranged.may_record
    is_exact = work.options.exact  # GEMMs of other sizes add in another order
    return work.options.wants(rewrite.id) and not is_known and not is_exact


def _pays(work: RangeWork, opened: OpenCapture, region: Region, points: Sequence[Sizes], rewrite: LayoutRewrite) -> bool:
    """Whether a change saves time at one point at least, and over all points together."""
    if not work.limit.has_room_for(_TIMED):
        return False
    with work.limit.spent_on(_TIMED):
        times = [_times(work, opened, region, sizes, budget_s=work.budget_s / len(points)) for sizes in points]
    gains = [before.median_ns / after.median_ns for before, after in times]
    is_clear = any(after.ci_high_ns < before.ci_low_ns * (1 - work.options.min_gain) for before, after in times)
    is_kept = is_clear and prod(gains) > 1
    where = "; ".join(f"{units.speedup(gain)} at {text_of(sizes)}" for gain, sizes in zip(gains, points, strict=True))
    work.progress.note(f"{rewrite.title}, as captured: {where}: {'kept' if is_kept else 'left out'}")
    return is_kept


def _times(work: RangeWork, opened: OpenCapture, region: Region, sizes: Sizes, *, budget_s: float) -> list[Timing]:
    """Time the graph without and with a change, in the way in which calls run it: in CUDA graphs, or launch by launch."""
    given, written = work.graph_call(opened, sizes)
    measured = work.instruments
    if not work.ranged.may_record:
        ways = [opened.region.graph.forward, region.graph.forward]
        return time_calls(ways, given, {}, measured, on_cuda=work.on_cuda, written=written, budget_s=budget_s)
    graphs = (opened, replace(opened, live=replace(opened.live, regions=[region])))
    benches = [
        Bench(
            at_one_size(one, given, written), on_cuda=work.on_cuda, timer=measured.timer, rest=measured.rest,
            record=measured.record,
        )
        for one in graphs
    ]  # fmt: skip
    runner = StepRunner(benches[0])
    calls = runner.recorded([step_of(bench, (), ()).run for bench in benches])
    times = interleaving.interleave(
        calls, rounds=_ROUNDS, budget_s=budget_s, rest=runner.rest(calls), on_cuda=runner.on_cuda, before=runner.rewind,
        timer=runner.timer,
    )  # fmt: skip
    del calls
    runner.forget()
    return [as_timing(side, runner.method) for side in times]
