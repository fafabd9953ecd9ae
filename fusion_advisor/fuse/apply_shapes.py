"""``--shapes``: after the example call was decided, the ranges around it get graphs, verdicts and kernels of their own.

Takes the fused model and what was asked for; puts a :class:`~fusion_advisor.fuse.shapes.serve.ShapeTable` into the model and
returns the record of it. Points are chosen here: the smallest sizes of a piece, its largest, and one in between, each decided on
the piece's own graph. Calls near a point run what stays there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt, prod
from typing import Any

import torch

from fusion_advisor import units
from fusion_advisor.capture.graph.side_effects import kept_as_it_is
from fusion_advisor.capture.sizes.open_capture import OpenCapture, capture_open
from fusion_advisor.errors import SizeRejected
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.session import BuiltFusion
from fusion_advisor.fuse.finish import AppliedRun
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.model_check import check_region
from fusion_advisor.fuse.passes.attention import DROP_MASKS
from fusion_advisor.fuse.passes.registry import PASSES, kept_ids
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.fuse.shapes.call_sizes import dims_of, resized
from fusion_advisor.fuse.shapes.decide_at import decide_at, example_args
from fusion_advisor.fuse.shapes.layouts import change_layouts
from fusion_advisor.fuse.shapes.pieces import Box, Piece, find_pieces
from fusion_advisor.fuse.shapes.serve import Served, ServedPiece, ShapeTable, serving
from fusion_advisor.fuse.shapes.sized_fusion import LooksAtSizes, Workpiece, all_sized, build, finished
from fusion_advisor.records import (
    Bandwidth,
    RenderedKernel,
    Report,
    ShapeFusion,
    ShapePiece,
    ShapePoint,
    ShapeRanges,
    SizeRange,
    Timing,
)
from fusion_advisor.runtime.torch_internals import module_call
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.host_timer import step_timer
from fusion_advisor.timing.wall_timer import as_timing
from fusion_advisor.workload.architecture import max_positions
from fusion_advisor.workload.device import current_device, is_out_of_memory
from fusion_advisor.workload.load import LoadedWorkload

_MOST_ELEMENTS = {"cpu": 2048, "cuda": 16384}
"""Of the product of the open sizes at the largest point: 16 requests of 1,024 tokens, or one of 16,384."""
_APART = 8
"""Points whose products differ by less are one: what pays at one pays at the other."""
_ROUNDS = 20
_BUDGET_S = 2.0


def check_ranges(loaded: LoadedWorkload, options: ApplyOptions) -> dict[str, tuple[str, ...]]:
    """Refuse ranges that the model cannot serve, ahead of any work; return the names of the call's dims.

    Each range is tried at its end in the original model (on a CPU: a position out of a table ends a GPU's process).

    Raises:
        SizeRejected: the model refuses a size; the error names the largest that it takes.
        UsageError: a name is no dim of the call.
    """
    assert options.shapes is not None
    dims = dims_of(loaded.args, loaded.kwargs, options.shapes)
    config = getattr(loaded.model, "config", None)
    limit = None if config is None else max_positions(config)
    for one in options.shapes.ranges:
        if one.name == "seq" and limit is not None and one.most > limit:
            raise SizeRejected(
                model_id=loaded.record.model_id, name="seq", size=one.most, cause=f"it has {limit} positions",
                largest=f"the largest that it takes is {limit}",
            )  # fmt: skip
    if loaded.record.device == "cpu":
        call = module_call.original_call(loaded.model)
        for one in options.shapes.ranges:
            _try_end(loaded, call, dims, options.shapes.ranges, one)
    return dims


def _try_end(
    loaded: LoadedWorkload, call: Callable[..., Any], dims: Mapping[str, tuple[str, ...]], ranges: Sequence[SizeRange],
    one: SizeRange,
) -> None:  # fmt: skip
    def refusal(size: int) -> Exception | None:
        sizes = {other.name: other.least for other in ranges} | {one.name: size}
        args, kwargs = resized(loaded.args, loaded.kwargs, dims, sizes)
        try:
            with torch.no_grad():
                call(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError, AssertionError) as error:
            return error
        return None

    error = refusal(one.most)
    if error is None or is_out_of_memory(error):
        return
    good, bad = one.least - 1, one.most
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if refusal(middle) is None else (good, middle)
    largest = f"the largest that it takes is {good}" if good >= one.least else f"it takes no {one.name} from {one.least} on"
    cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    raise SizeRejected(model_id=loaded.record.model_id, name=one.name, size=one.most, cause=cause, largest=largest) from error


def points_of(box: Box, *, most: int, asked: Sequence[tuple[int, ...]] = ()) -> list[dict[str, int]]:
    """Return the sizes at which rewrites are decided.

    Args:
        box: of a piece.
        most: product of the sizes at the largest point.
        asked: by the user, in the order of the ranges; those inside are taken as they are.
    """
    names = [one.name for one in box]
    mine = [point for point in asked if all(one.holds(size) for one, size in zip(box, point, strict=True))]
    if mine:
        return [dict(zip(names, point, strict=True)) for point in mine]
    least, largest = {one.name: one.least for one in box}, {one.name: one.most for one in box}
    while prod(largest.values()) > most and any(largest[one.name] > one.least for one in box):
        widest = max(box, key=lambda one: largest[one.name] / one.least)
        largest[widest.name] = max(widest.least, largest[widest.name] // 2)
    middle = {name: isqrt(least[name] * largest[name]) for name in names}
    found = [least]
    for point in (middle, largest):
        if prod(point.values()) >= _APART * prod(found[-1].values()):
            found.append(point)
    if found[-1] is not largest and prod(largest.values()) > prod(found[-1].values()) and len(found) > 1:
        found[-1] = largest
    return found


@dataclass(slots=True)
class _Shapes:
    """The work on one model's ranges."""

    loaded: LoadedWorkload
    options: ApplyOptions
    dims: Mapping[str, tuple[str, ...]]
    bandwidth: Bandwidth
    progress: Progress
    instruments: Instruments
    original: Callable[..., Any]
    kept: Collection[str] = ()
    """Ids of rewrites of the example's plan."""
    refused: set[str] = field(default_factory=lambda: {name for name, one in PASSES.items() if one.needs_numbers})
    """Graph passes that look at numbers or at tensors of one size."""

    def call_at(self, sizes: Mapping[str, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return resized(self.loaded.args, self.loaded.kwargs, self.dims, sizes)

    def capture(self, sizes: dict[str, int]) -> OpenCapture:
        args, kwargs = self.call_at(sizes)
        self.progress.note(f"captured with open sizes at {_text(sizes)}")
        return capture_open(self.loaded.model, args, kwargs, self.dims, model_id=self.loaded.record.model_id)

    @property
    def on_cuda(self) -> bool:
        return self.loaded.record.device.startswith("cuda")


def serve_shapes(
    fused: FusedModel, loaded: LoadedWorkload, options: ApplyOptions, dims: Mapping[str, tuple[str, ...]],
    bandwidth: Bandwidth, progress: Progress, instruments: Instruments = MEASURED, kept: Collection[str] = (),
) -> ShapeRanges:  # fmt: skip
    """Let a fused model serve ranges of sizes.

    Args:
        fused: the model, with what was kept for the example call.
        loaded: the model and that call.
        options: with ``shapes``.
        dims: from :func:`check_ranges`.
        bandwidth: of the device.
        progress: gets lines.
        instruments: measure and decide.
        kept: ids of rewrites that were kept for the example call: changes of layouts among them are made here too.
    """
    assert options.shapes is not None
    started = time.perf_counter()
    work = _Shapes(
        loaded=loaded, options=options, dims=dims, bandwidth=bandwidth, progress=progress, instruments=instruments,
        original=module_call.original_call(loaded.model), kept=kept,
    )  # fmt: skip
    ranges = options.shapes.ranges
    served, rows = [], []
    for piece in find_pieces(ranges, work.capture):
        one, row = _served(work, piece)
        served.append(one)
        rows.append(row)
        (progress.found if _serving_points(row) else progress.warn)(_outcome(row))
    fused.serve(ShapeTable(ranges, dims, served, (loaded.args, loaded.kwargs)))
    points = sum(len(row.points) for row in rows)
    progress.note(f"decided at {points} points; graphs: {len(rows)}")
    return ShapeRanges(
        asked=ranges, dims=tuple(dims.items()), pieces=tuple(rows), seconds=round(time.perf_counter() - started, 3)
    )


def with_shapes(
    run: AppliedRun, loaded: LoadedWorkload, options: ApplyOptions, dims: Mapping[str, tuple[str, ...]], progress: Progress,
    clock: PhaseClock, on_report: Callable[[Report], object], instruments: Instruments = MEASURED,
) -> AppliedRun:  # fmt: skip
    """Let what a run has fused serve the ranges that were asked for, and add them to its report.

    Args:
        run: of the example call.
        loaded: the model and that call.
        options: with ``shapes``.
        dims: from :func:`check_ranges`.
        progress: gets lines.
        clock: of the phases.
        on_report: given the report.
        instruments: measure and decide.
    """
    if options.dry_run:
        return run
    with (
        clock.phase("shapes"), current_device(torch.device(loaded.record.device)),
        kept_as_it_is(loaded.model, loaded.args, loaded.kwargs),
    ):  # fmt: skip
        found = serve_shapes(
            run.fused, loaded, options, dims, run.report.bandwidth, progress, instruments, kept_ids(run.report.rewrites)
        )
    if any(not point.reason for piece in found.pieces for point in piece.points):
        run.fused.apply()
    report = replace(run.report, shapes=found, durations_s=tuple(clock.durations_s))
    run.fused.report = report
    on_report(report)
    return replace(run, report=report)


def _served(work: _Shapes, piece: Piece) -> tuple[ServedPiece, ShapePiece]:
    """Decide a piece, and start it."""
    opened = piece.opened
    if opened is None:
        return serving(piece, ()), ShapePiece(ranges=piece.box, refusal=piece.refusal)
    changes = change_layouts(opened, work.kept)
    asked = work.options.shape_points
    points = points_of(piece.box, most=_MOST_ELEMENTS["cuda" if work.on_cuda else "cpu"], asked=asked)
    workpiece = Workpiece(piece)
    rows, found = [], []
    kernels: dict[str, RenderedKernel] = {}
    for sizes in points:
        try:
            served, point = _decided(work, workpiece, sizes, changes, kernels)
        except LooksAtSizes as error:
            work.refused.add(str(error))
            return _served(work, replace(piece, opened=work.capture(dict(opened.sizes))))
        rows.append(point)
        found.append(served)
    workpiece.forget_records()
    row = ShapePiece(
        ranges=piece.box,
        points=tuple(rows),
        kernels=tuple(kernels.values()),
        layouts=tuple(changes),
        graph=workpiece.graph_hash(),
    )
    return serving(piece, found), row


def _decided(
    work: _Shapes, workpiece: Workpiece, sizes: dict[str, int], changes: Sequence[str], kernels: dict[str, RenderedKernel]
) -> tuple[Served, ShapePoint]:
    """Decide one point of a piece: what runs near it, and its row; ``kernels`` gets the kernels by name."""
    where = tuple(sizes.items())
    args, kwargs = work.call_at(sizes)
    given = example_args(workpiece.opened, args, kwargs)
    work.progress.note(f"at {_text(sizes)}")
    decided = decide_at(
        workpiece.opened, given, work.options, work.bandwidth, work.instruments, Progress(),
        budget_s=_BUDGET_S, only=lambda name: name not in work.refused,
    )  # fmt: skip
    fusions, dropped = all_sized(workpiece, decided.fusions)
    dropped += [(name, "it decides by one size") for name in decided.refused]
    if not fusions and not decided.passes and not changes:
        reason = "nothing that serves other sizes pays near these"
        return Served(sizes=sizes, module=None, reason=reason), ShapePoint(sizes=where, dropped=tuple(dropped), reason=reason)
    module = build(workpiece, fusions, decided.passes)
    served = finished(workpiece, module, sizes, with_flags=DROP_MASKS.id in decided.passes)
    module = served.graph_at(tuple(sizes[name] for name in workpiece.names))
    kernels.update({fusion.kernel.name: fusion.kernel for fusion in fusions})
    names = (*(fusion.planned.match.kernel for fusion in fusions), *decided.passes, *changes)
    check = check_region(decided.region, module.forward)
    row = ShapePoint(
        sizes=where, rewrites=names, fusions=tuple(map(_row_of, fusions)), passes=decided.passes, dropped=tuple(dropped),
        rel_l2=check.fused_rel_l2, eager_rel_l2=check.eager_rel_l2,
    )  # fmt: skip
    if not check.is_passed:
        reason = f"all rewrites together: relative error {check.fused_rel_l2:.2e}; the limit is: {check.limit}"
        return Served(sizes=sizes, module=None, reason=reason), replace(row, reason=reason)
    if work.options.is_timed:
        eager, ours = _timed(work, module, given, args, kwargs)
        row = replace(row, eager=eager, ours=ours)
        if ours.ci_low_ns > eager.ci_high_ns:
            times = f"{units.duration(eager.median_ns)}, ours {units.duration(ours.median_ns)}"
            reason = f"near these sizes the original ops take {times}"
            return Served(sizes=sizes, module=None, reason=reason), replace(row, reason=reason)
    return served, row


def _row_of(fusion: BuiltFusion) -> ShapeFusion:
    planned = fusion.planned
    return ShapeFusion(
        match=planned.match, kernel=fusion.kernel.name, sites=tuple(site.op_indices for site in planned.chain.sites)
    )


def _timed(
    work: _Shapes, module: torch.fx.GraphModule, given: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Timing, Timing]:  # fmt: skip
    """Time the original call against the rewritten graph, launch by launch."""
    timer = work.instruments.timer or step_timer(on_cuda=work.on_cuda)
    with torch.no_grad():
        calls = [lambda: work.original(*args, **kwargs), lambda: module.forward(*given)]
        for call in itertools.chain(calls, calls):
            call()
        times = interleaving.interleave(calls, rounds=_ROUNDS, budget_s=_BUDGET_S, on_cuda=work.on_cuda, timer=timer)
    method = "cuda_events" if work.on_cuda else timer.method
    eager, ours = (as_timing(side, method) for side in times)
    return eager, ours


def _serving_points(row: ShapePiece) -> list[ShapePoint]:
    return [point for point in row.points if not point.reason]


def _outcome(row: ShapePiece) -> str:
    where, served = ", ".join(one.text for one in row.ranges), _serving_points(row)
    if not served:
        return f"{where}: the original ops run. {row.refusal or row.points[0].reason}"
    gains = [point.eager.median_ns / point.ours.median_ns for point in served if point.eager and point.ours]
    speed = f": {', '.join(units.speedup(gain) for gain in gains)}" if gains else ""
    return f"rewrites for {where} at {len(served)} of {len(row.points)} points{speed}"


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
