"""One point of a piece: what is known of it, its check against fp64, and the times of its call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from fusion_advisor import units
from fusion_advisor.autotune.build_ahead import BuildAhead
from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.capture.sizes.one_size import runnable_at
from fusion_advisor.capture.sizes.open_capture import OpenCapture, Sizes, capture_open
from fusion_advisor.fuse.cuda_graph.recording import CudaRecorder, Recorder
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.decide.session import BuiltFusion
from fusion_advisor.fuse.live.model_check import check_region
from fusion_advisor.fuse.passes.cuda_graph import CUDA_GRAPH
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.plan.size_ranges import CACHED
from fusion_advisor.fuse.points.graph_trial import after_a_look, in_graphs
from fusion_advisor.fuse.points.time_limit import TimeLimit
from fusion_advisor.fuse.shapes.decide_at import example_args
from fusion_advisor.fuse.shapes.pieces import Box, Served
from fusion_advisor.fuse.shapes.ranged_calls import RangedCall
from fusion_advisor.fuse.shapes.sized_fusion import Workpiece
from fusion_advisor.fuse.shapes.time_calls import time_calls
from fusion_advisor.fuse.shapes.try_sizes import REFUSALS, refuse_sizes
from fusion_advisor.records import Bandwidth, ShapeFusion, ShapePoint, Timing
from fusion_advisor.verify.known.passed_checks import PassedChecks
from fusion_advisor.workload.load import LoadedWorkload

MOST_ELEMENTS = {"cpu": 2048, "cuda": 16384}
"""Of the product of the open sizes at the largest point: 16 requests of 1,024 tokens, or one of 16,384."""
_BUDGET_S = {"quick": 0.7}
_USUAL_BUDGET_S = 2.0
"""For timing the step at a point, and again for timing the call; at least six rounds are made in any case."""
MOST_FIRST_USE_NS = 50_000_000
"""By so much at most may the launches of a call, which its first use runs, be slower than the original ops."""


@dataclass(slots=True)
class RangeWork:
    """The work on one call's ranges.

    Attributes:
        loaded: the model and its example call.
        options: of the run.
        ranged: the call.
        bandwidth: of the device.
        progress: gets lines.
        instruments: measure and decide.
        original: the model's own call.
        limit: of the time.
        passed: checks that no size decides.
        kept: ids of rewrites of the example's plan.
        ahead: compiles kernels side by side.
        pads: whether calls may run in CUDA graphs of larger shapes, where it is proved that padding changes nothing.
        refused: graph passes that decide by one size.
        starts: by piece, what it needs to start without a trace.
    """

    loaded: LoadedWorkload
    options: ApplyOptions
    ranged: RangedCall
    bandwidth: Bandwidth
    progress: Progress
    instruments: Instruments
    original: Callable[..., Any]
    limit: TimeLimit
    passed: PassedChecks
    kept: Collection[str] = ()
    ahead: BuildAhead | None = None
    pads: bool = False
    refused: set[str] = field(default_factory=set)
    starts: dict[Box, dict[str, Any]] = field(default_factory=dict)

    @property
    def budget_s(self) -> float:
        """Seconds for each timing at a point."""
        return _BUDGET_S.get(self.options.effort, _USUAL_BUDGET_S)

    @property
    def may_pad(self) -> bool:
        """Whether padding is looked at; its reasons name the line of an op."""
        return self.pads and self.ranged.may_pad

    @property
    def recorder(self) -> Recorder | None:
        """What records a call to time it; None where there are no CUDA graphs."""
        return CudaRecorder() if self.pads and self.on_cuda else None

    @property
    def on_cuda(self) -> bool:
        """Whether the model is on a GPU."""
        return self.loaded.record.device.startswith("cuda")

    def capture(self, sizes: dict[str, int]) -> OpenCapture:
        """Capture the call with open sizes.

        Args:
            sizes: at which it is traced.

        Raises:
            SizeRejected: the model refuses them.
        """
        args, kwargs = self.ranged.at(sizes)
        self.progress.note(f"captured with open sizes at {text_of(sizes)}")
        try:
            return capture_open(
                self.loaded.model, args, kwargs, self.ranged.dims, model_id=self.loaded.record.model_id,
                with_lines=self.may_pad,
            )  # fmt: skip
        except REFUSALS:
            refuse_sizes(self.loaded, self.ranged, sizes)
            raise

    def graph_call(self, opened: OpenCapture, sizes: Sizes) -> tuple[tuple[Any, ...], Written]:
        """Return what a piece's graph is called with at some sizes, and what that call writes to.

        Args:
            opened: the graph.
            sizes: of the call.
        """
        args, kwargs = self.ranged.at(sizes)
        written = opened.written_in(args, kwargs)
        given = example_args(opened, args, kwargs)
        written.restore()
        return given, written


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What became of a point.

    Attributes:
        served: what runs near it.
        row: of the report.
        fusions: in ``served``, at all sizes of the piece.
        is_right_elsewhere: it was run at moderate sizes of the piece as well.
    """

    served: Served
    row: ShapePoint
    fusions: tuple[BuiltFusion, ...] = ()
    is_right_elsewhere: bool = False

    def refused(self, reason: str) -> Decided:
        """Return the same with the original ops in its place.

        Args:
            reason: why.
        """
        return replace(
            self, served=Served(sizes=self.served.sizes, module=None, reason=reason), row=replace(self.row, reason=reason)
        )

    def in_segments(self, *, is_on: bool) -> Decided:
        """Return the same with its call in segments, or launch by launch."""
        return replace(self, served=replace(self.served, in_segments=is_on), row=replace(self.row, in_segments=is_on))


def not_decided(sizes: Sizes, reason: str) -> Decided:
    """Return a point near which the original ops run, because nothing was tried there.

    Args:
        sizes: of the point.
        reason: why nothing was.
    """
    row = ShapePoint(sizes=tuple(sizes.items()), reason=reason)
    return Decided(served=Served(sizes=sizes, module=None, reason=reason), row=row)


def checked(work: RangeWork, workpiece: Workpiece, one: Decided, given: Sequence[Any]) -> Decided:
    """Check what runs near a point against fp64, at the point and at moderate sizes of the piece.

    Args:
        work: on the piece's call.
        workpiece: the piece.
        one: the point, with rewrites.
        given: what the piece's graph is called with there.
    """
    region = runnable_at(workpiece.captured, given)
    check = check_region(region, module_at(workpiece, one.served, given).forward)
    one = replace(one, row=replace(one.row, rel_l2=check.fused_rel_l2, eager_rel_l2=check.eager_rel_l2))
    if not check.is_passed:
        return one.refused(f"all rewrites together: relative error {check.fused_rel_l2:.2e}; the limit is: {check.limit}")
    reason = None if one.is_right_elsewhere else wrong_elsewhere(work, workpiece, one.served)
    if reason:
        return one.refused(reason)
    return one if reason is None else replace(one, is_right_elsewhere=True)


def wrong_elsewhere(work: RangeWork, workpiece: Workpiece, served: Served) -> str | None:
    """Say where what was built at one point is wrong at another, of moderate sizes without 1.

    Args:
        work: on the piece's call.
        workpiece: the piece.
        served: what was built.

    Returns:
        An empty text where it is right; None where the point itself is of such sizes, or smaller.
    """
    point = next((one for one in workpiece.points if workpiece.opened.holds(workpiece.sizes(one))), None)
    if point is None:
        return None
    other = workpiece.sizes(point)
    if other == served.sizes or prod(other.values()) > max(prod(served.sizes.values()), MOST_ELEMENTS["cpu"]):
        return None
    given, written = work.graph_call(workpiece.opened, other)
    check = check_region(runnable_at(workpiece.captured, given), served.graph_at(point).forward)
    written.restore()
    error = f"relative error {check.fused_rel_l2:.2e}; the limit is: {check.limit}"
    return "" if check.is_passed else f"all rewrites together, at {text_of(other)}: {error}"


def timed(work: RangeWork, workpiece: Workpiece, one: Decided, given: Sequence[Any] = ()) -> Decided:
    """Time the original call at a point against the same call through dynamo's guards and the rewritten graph.

    The rewritten graph is timed launch by launch and, on a GPU, in CUDA graphs, as calls run from their second use on: in one
    graph of the whole call, or in segments on a growing cache. The faster way's time is ours. Without timing a call on a growing
    cache runs in segments wherever there are CUDA graphs.

    Args:
        work: on the piece's call.
        workpiece: the piece.
        one: the point; one that is refused already stays as it is.
        given: what the piece's graph is called with there.
    """
    if one.row.reason:
        return one
    if not work.options.is_timed:
        return one.in_segments(is_on=bool(workpiece.opened.symbols_of(CACHED)))
    module = module_at(workpiece, one.served, given)
    masks = one.served.masks if module is one.served.unmasked else ()
    times = _times(work, workpiece.opened, module, one.served.sizes, masks)
    is_whole = work.ranged.may_record
    one = replace(one, row=replace(one.row, eager=times.eager, ours=times.ours, in_graph=times.is_replayed and is_whole))
    one = one.in_segments(is_on=times.is_replayed and not is_whole)
    if times.refusal:
        work.progress.note(f"without its CUDA graph: {times.refusal}")
        one = replace(one, row=replace(one.row, dropped=(*one.row.dropped, (CUDA_GRAPH.id, times.refusal))))
    reason = times.why_slower
    return one.refused(reason) if reason else one


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Times of a call at a point.

    Attributes:
        eager: the original ops.
        launched: the rewritten graph, launch by launch.
        recorded: the same in CUDA graphs; None where it was not recorded.
        refusal: why it was not, where it should have been.
    """

    eager: Timing
    launched: Timing
    recorded: Timing | None = None
    refusal: str = ""

    @property
    def is_replayed(self) -> bool:
        """Whether CUDA graphs are faster than launches."""
        return self.recorded is not None and self.recorded.ci_high_ns < self.launched.ci_low_ns

    @property
    def ours(self) -> Timing:
        """The faster way's time."""
        return self.recorded if self.recorded is not None and self.is_replayed else self.launched

    @property
    def why_slower(self) -> str:
        """Why the original ops run; empty where ours does."""
        if self.ours.ci_low_ns > self.eager.ci_high_ns:
            return f"the original ops take {units.duration(self.eager.median_ns)}, ours {units.duration(self.ours.median_ns)}"
        if self.launched.ci_low_ns - self.eager.ci_high_ns > MOST_FIRST_USE_NS:
            first, eager = units.duration(self.launched.median_ns), units.duration(self.eager.median_ns)
            return f"a first use is launched: {first}; the original ops take {eager}"
        return ""


def module_at(workpiece: Workpiece, served: Served, given: Sequence[Any] = ()) -> torch.fx.GraphModule:
    """Return the graph that runs at a point itself.

    Args:
        workpiece: the piece.
        served: what runs near the point.
        given: what it is called with; empty: the graph that serves any masks is meant.
    """
    point = tuple(served.sizes[name] for name in workpiece.names)
    return served.graph_for(point, given) if given else served.graph_at(point)


def fusion_row(fusion: BuiltFusion) -> ShapeFusion:
    """Return the row of a chain with its kernel, at all sizes of a piece."""
    planned = fusion.planned
    return ShapeFusion(
        match=planned.match, kernel=fusion.kernel.name, sites=tuple(site.op_indices for site in planned.chain.sites)
    )


def _times(work: RangeWork, opened: OpenCapture, module: torch.fx.GraphModule, sizes: Sizes, masks: Sequence[int] = ()) -> _Times:
    """Time a call; ``masks`` are places of inputs that each call looks at."""
    route, compiled = opened.region.route, opened.live.compiled
    assert route is not None
    assert compiled is not None
    # The call that was checked has moved its cache on. Dynamo would trace it again, so a new one is timed.
    args, kwargs = work.ranged.at(sizes)
    written = opened.written_in(args, kwargs)
    before = route.forward
    recorder = work.recorder
    graphs = None if recorder is None else Graphs(recorder, most_bytes=work.options.graph_bytes)
    with in_graphs(opened, module, work.ranged, (args, kwargs), graphs, masks) as graphed:

        def ours(*args: Any, **kwargs: Any) -> Any:
            route.forward = after_a_look(masks, module.forward)
            return compiled.call(*args, **kwargs)

        ways: list[Callable[..., Any]] = [work.original, ours]
        if graphed is not None and not graphed.refusal:
            ways.append(graphed)
        try:
            eager, launched, *others = time_calls(
                ways, args, kwargs, work.instruments, on_cuda=work.on_cuda, written=written, budget_s=work.budget_s
            )
        finally:
            route.forward = before
        is_recorded = graphed is not None and graphed.is_recorded
        refusal = "" if graphed is None else graphed.refusal
    return _Times(eager=eager, launched=launched, recorded=others[0] if is_recorded else None, refusal=refusal)


def text_of(sizes: Mapping[str, int]) -> str:
    """Return sizes in words."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
