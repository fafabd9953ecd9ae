"""``--shapes``: after the example call was decided, the ranges around it get graphs, verdicts and kernels of their own.

Takes the fused model and what was asked for; puts a :class:`~fusion_advisor.fuse.shapes.serve.ShapeTable` into the model and
returns the record of it. Points are chosen here: the smallest sizes of a piece, its largest, and one in between, each decided on
the piece's own graph. Calls near a point run what stays there.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from fusion_advisor import units
from fusion_advisor.autotune.build_ahead import BuildAhead
from fusion_advisor.autotune.start_compilers import building_ahead
from fusion_advisor.capture.graph.side_effects import kept_as_it_is
from fusion_advisor.capture.sizes.one_size import at_one_size
from fusion_advisor.capture.sizes.open_capture import OpenCapture, Sizes, capture_open
from fusion_advisor.errors import SizeRejected
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.session import BuiltFusion
from fusion_advisor.fuse.finish import AppliedRun
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.model_check import check_region
from fusion_advisor.fuse.live.padding_trial import tried_padding
from fusion_advisor.fuse.passes.attention import DROP_MASKS
from fusion_advisor.fuse.passes.registry import PASSES, kept_ids
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.fuse.plan.size_ranges import CACHED
from fusion_advisor.fuse.shapes.decide_at import decide_at, example_args
from fusion_advisor.fuse.shapes.layouts import change_layouts
from fusion_advisor.fuse.shapes.pieces import Box, Piece, points_of
from fusion_advisor.fuse.shapes.proved_sizes import prove_sizes
from fusion_advisor.fuse.shapes.ranged_calls import RangedCall, generate_hint, generate_of, ranged_calls, with_room
from fusion_advisor.fuse.shapes.serve import Served, ServedPiece, ShapeTable, serving
from fusion_advisor.fuse.shapes.show_padding import ShownPadding
from fusion_advisor.fuse.shapes.sized_fusion import LooksAtSizes, Workpiece, all_sized, build, finished
from fusion_advisor.fuse.shapes.time_calls import time_calls
from fusion_advisor.fuse.shapes.try_sizes import REFUSALS, refuse_sizes, try_ends
from fusion_advisor.fuse.start.record import piece_of
from fusion_advisor.records import (
    Bandwidth,
    RenderedKernel,
    Report,
    ShapeFusion,
    ShapePiece,
    ShapePoint,
    ShapeRanges,
    Timing,
)
from fusion_advisor.runtime.torch_internals import module_call
from fusion_advisor.workload.architecture import max_positions
from fusion_advisor.workload.device import current_device
from fusion_advisor.workload.load import LoadedWorkload

_MOST_ELEMENTS = {"cpu": 2048, "cuda": 16384}
"""Of the product of the open sizes at the largest point: 16 requests of 1,024 tokens, or one of 16,384."""
_BUDGET_S = 2.0


def check_ranges(loaded: LoadedWorkload, options: ApplyOptions) -> list[RangedCall]:
    """Refuse ranges that the model cannot serve, ahead of any work; return the calls that they are ranges of.

    Each range is tried at both ends in the original model (on a CPU: a position out of a table ends a GPU's process).

    Raises:
        SizeRejected: the model refuses a size; the error names the largest or the smallest that it takes.
        UsageError: a name is no dim of the call.
    """
    assert options.shapes is not None
    config = getattr(loaded.model, "config", None)
    limit = None if config is None else max_positions(config)
    for one in options.shapes.ranges:
        # A decode step adds a position to those in the cache.
        most = None if limit is None else {"seq": limit, CACHED: limit - 1}.get(one.name)
        if most is not None and one.most > most:
            raise SizeRejected(
                model_id=loaded.record.model_id, name=one.name, size=one.most, cause=f"it has {limit} positions",
                largest=f"the largest that it takes is {most}",
            )  # fmt: skip
    calls = ranged_calls(loaded, options.shapes)
    if loaded.record.device == "cpu":
        for call in calls:
            if not call.refusal:
                try_ends(loaded, call)
    return calls


@dataclass(slots=True)
class _Shapes:
    """The work on one call's ranges."""

    loaded: LoadedWorkload
    options: ApplyOptions
    ranged: RangedCall
    bandwidth: Bandwidth
    progress: Progress
    instruments: Instruments
    original: Callable[..., Any]
    kept: Collection[str] = ()
    """Ids of rewrites of the example's plan."""
    ahead: BuildAhead | None = None
    """Compiles kernels side by side."""
    pads: bool = False
    """Whether calls may run in CUDA graphs of larger shapes, where it is proved that padding changes nothing."""
    refused: set[str] = field(default_factory=lambda: {name for name, one in PASSES.items() if one.needs_numbers})
    """Graph passes that look at numbers or at tensors of one size."""
    starts: dict[Box, dict[str, Any]] = field(default_factory=dict)
    """By piece, what it needs to start without a trace."""

    def call_at(self, sizes: Mapping[str, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.ranged.at(sizes)

    def capture(self, sizes: dict[str, int]) -> OpenCapture:
        args, kwargs = self.call_at(sizes)
        self.progress.note(f"captured with open sizes at {_text(sizes)}")
        try:
            return capture_open(
                self.loaded.model, args, kwargs, self.ranged.dims, model_id=self.loaded.record.model_id, with_lines=True
            )
        except REFUSALS:
            refuse_sizes(self.loaded, self.ranged, sizes)
            raise

    @property
    def on_cuda(self) -> bool:
        return self.loaded.record.device.startswith("cuda")


def serve_shapes(
    fused: FusedModel, loaded: LoadedWorkload, options: ApplyOptions, calls: Sequence[RangedCall], bandwidth: Bandwidth,
    progress: Progress, instruments: Instruments = MEASURED, kept: Collection[str] = (), ahead: BuildAhead | None = None,
) -> tuple[ShapeRanges, tuple[dict[str, Any], ...]]:  # fmt: skip
    """Let a fused model serve ranges of sizes.

    Args:
        fused: the model, with what was kept for the example call.
        loaded: the model and that call.
        options: with ``shapes``.
        calls: from :func:`check_ranges`.
        bandwidth: of the device.
        progress: gets lines.
        instruments: measure and decide.
        kept: ids of rewrites that were kept for the example call: changes of layouts among them are made here too.
        ahead: compiles kernels side by side.

    Returns:
        The record of it, and what each piece needs to start without a trace.
    """
    assert options.shapes is not None
    started = time.perf_counter()
    original = module_call.original_call(loaded.model)
    tables, rows = [], []
    starts: list[dict[str, Any]] = []
    for call in calls:
        work = _Shapes(
            loaded=loaded, options=options, ranged=call, bandwidth=bandwidth, progress=progress, instruments=instruments,
            original=original, kept=kept, ahead=ahead, pads=fused.graphs is not None,
        )  # fmt: skip
        served = []
        for piece in call.pieces(work.capture):
            one, row = _served(work, piece)
            served.append(one)
            rows.append(row)
            (progress.found if _serving_points(row) else progress.warn)(_outcome(row))
        tables.append(ShapeTable(call.ranges, call.dims, served, (call.args, call.kwargs), may_record=call.may_record))
        starts += work.starts.values()
    fused.serve(tables, generate_of(loaded, calls))
    points = sum(len(row.points) for row in rows)
    progress.note(f"decided at {points} points; graphs: {len(rows)}")
    ranges = ShapeRanges(
        asked=options.shapes.ranges, dims=tuple(one for call in calls for one in call.shown_dims), pieces=tuple(rows),
        seconds=round(time.perf_counter() - started, 3),
    )  # fmt: skip
    return ranges, tuple(starts)


def with_shapes(
    run: AppliedRun, loaded: LoadedWorkload, options: ApplyOptions, calls: Sequence[RangedCall], progress: Progress,
    clock: PhaseClock, on_report: Callable[[Report], object], instruments: Instruments = MEASURED,
) -> AppliedRun:  # fmt: skip
    """Let what a run has fused serve the ranges that were asked for, and add them to its report.

    Args:
        run: of the example call.
        loaded: the model and that call.
        options: with ``shapes``.
        calls: from :func:`check_ranges`.
        progress: gets lines.
        clock: of the phases.
        on_report: given the report.
        instruments: measure and decide.
    """
    if options.dry_run:
        return run
    with (
        clock.phase("shapes"), current_device(torch.device(loaded.record.device)),
        kept_as_it_is(loaded.model, loaded.args, loaded.kwargs), building_ahead(loaded.record.device, progress.warn) as ahead,
    ):  # fmt: skip
        is_exact_plan = run.fused.is_applied
        found, starts = serve_shapes(
            run.fused,
            loaded,
            options,
            calls,
            run.report.bandwidth,
            progress,
            instruments,
            kept_ids(run.report.rewrites),
            ahead,
        )
        pair = _exact_and_general(run.fused, loaded, instruments) if options.is_timed and is_exact_plan else None
        if pair is not None:
            found = replace(found, exact=pair[0], general=pair[1])
    if any(not point.reason for piece in found.pieces for point in piece.points):
        run.fused.apply()
    hint = generate_hint(loaded.model, options.shapes) if options.shapes is not None else ""
    if hint:
        progress.warn(hint)
    notes = (*run.report.notes, f"{hint}.") if hint else run.report.notes
    report = replace(run.report, shapes=found, durations_s=tuple(clock.durations_s), notes=notes)
    run.fused.report = report
    on_report(report)
    write_start = None if run.write_start is None else functools.partial(run.write_start, pieces=starts)
    return replace(run, report=report, write_start=write_start)


def _served(work: _Shapes, piece: Piece) -> tuple[ServedPiece, ShapePiece]:
    """Decide a piece, and start it."""
    started, opened = time.perf_counter(), piece.opened
    if opened is None:
        return serving(piece, ()), ShapePiece(call=work.ranged.name, ranges=piece.box, refusal=piece.refusal)
    work.starts[piece.box] = piece_of(work.loaded.model, opened, work.ranged.name, piece.box)
    proved = prove_sizes(opened, piece.box) if work.pads else None
    changes = change_layouts(opened, work.kept)
    assert work.options.shapes is not None
    names = [one.name for one in work.options.shapes.ranges]
    asked = [with_room(dict(zip(names, point, strict=True))) for point in work.options.shape_points]
    points = points_of(piece.box, most=_MOST_ELEMENTS["cuda" if work.on_cuda else "cpu"], asked=asked)
    workpiece = Workpiece(piece, work.ahead)
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
    shown = ShownPadding()
    if proved is not None:
        spent_s, is_timed = time.perf_counter() - started, work.on_cuda and work.options.is_timed
        shown = tried_padding(
            work.ranged, opened, piece.box, found, proved, work.instruments, spent_s=spent_s, is_timed=is_timed
        )  # fmt: skip
    rows = [replace(row, pads=shown.serves(point)) for row, point in zip(rows, found, strict=True)]
    row = ShapePiece(
        call=work.ranged.name,
        ranges=piece.box,
        points=tuple(rows),
        kernels=tuple(kernels.values()),
        layouts=tuple(changes),
        graph=workpiece.graph_hash(),
        padded=shown.names,
        masked=tuple(name for name in shown.names if shown.padding is not None and name in shown.padding.form.masked),
        capacities=shown.capacities(piece.box),
        not_padded=shown.refused,
        padding_seconds=round(shown.seconds, 3),
    )
    return serving(piece, found, shown.padding), row


def _decided(
    work: _Shapes, workpiece: Workpiece, sizes: dict[str, int], changes: Sequence[str], kernels: dict[str, RenderedKernel]
) -> tuple[Served, ShapePoint]:
    """Decide one point of a piece: what runs near it, and its row; ``kernels`` gets the kernels by name."""
    where = tuple(sizes.items())
    args, kwargs = work.call_at(sizes)
    written = workpiece.opened.written_in(args, kwargs)
    given = example_args(workpiece.opened, args, kwargs)
    written.restore()
    work.progress.note(f"at {_text(sizes)}")
    decided = decide_at(
        workpiece.opened, given, work.options, work.bandwidth, work.instruments, Progress(),
        budget_s=_BUDGET_S, only=lambda name: name not in work.refused, written=written,
        ahead=work.ahead,
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
    names = tuple(dict.fromkeys((*(fusion.planned.match.kernel for fusion in fusions), *decided.passes, *changes)))
    written.restore()
    check = check_region(decided.region, module.forward)
    row = ShapePoint(
        sizes=where, rewrites=names, fusions=tuple(map(_row_of, fusions)), passes=decided.passes, dropped=tuple(dropped),
        rel_l2=check.fused_rel_l2, eager_rel_l2=check.eager_rel_l2,
    )  # fmt: skip
    if not check.is_passed:
        reason = f"all rewrites together: relative error {check.fused_rel_l2:.2e}; the limit is: {check.limit}"
        return Served(sizes=sizes, module=None, reason=reason), replace(row, reason=reason)
    reason = _wrong_elsewhere(work, workpiece, served, sizes)
    if reason:
        return Served(sizes=sizes, module=None, reason=reason), replace(row, reason=reason)
    if work.options.is_timed:
        eager, ours = _timed(work, workpiece.opened, module, sizes)
        row = replace(row, eager=eager, ours=ours)
        if ours.ci_low_ns > eager.ci_high_ns:
            times = f"{units.duration(eager.median_ns)}, ours {units.duration(ours.median_ns)}"
            reason = f"the original ops take {times}"
            return Served(sizes=sizes, module=None, reason=reason), replace(row, reason=reason)
    return served, row


def _wrong_elsewhere(work: _Shapes, workpiece: Workpiece, served: Served, sizes: Sizes) -> str:
    """Say where what was built at one point is wrong at another, of moderate sizes without 1; empty where it is right."""
    point = workpiece.first_point
    other = workpiece.sizes(point)
    if other == sizes or prod(other.values()) > max(prod(sizes.values()), _MOST_ELEMENTS["cpu"]):
        return ""
    args, kwargs = work.call_at(other)
    written = workpiece.opened.written_in(args, kwargs)
    given = example_args(workpiece.opened, args, kwargs)
    written.restore()
    region = at_one_size(workpiece.opened, given, written).regions[0]
    check = check_region(region, served.graph_at(point).forward)
    written.restore()
    error = f"relative error {check.fused_rel_l2:.2e}; the limit is: {check.limit}"
    return "" if check.is_passed else f"all rewrites together, at {_text(other)}: {error}"


def _row_of(fusion: BuiltFusion) -> ShapeFusion:
    planned = fusion.planned
    return ShapeFusion(
        match=planned.match, kernel=fusion.kernel.name, sites=tuple(site.op_indices for site in planned.chain.sites)
    )


def _timed(work: _Shapes, opened: OpenCapture, module: torch.fx.GraphModule, sizes: Sizes) -> list[Timing]:
    """Time the original call against the same call through dynamo's guards and the rewritten graph."""
    route, compiled = opened.region.route, opened.live.compiled
    assert route is not None
    assert compiled is not None
    # The call that was checked has moved its cache on. Dynamo would trace it again, so a new one is timed.
    args, kwargs = work.call_at(sizes)
    written = opened.written_in(args, kwargs)
    before, route.forward = route.forward, module.forward
    try:
        return time_calls([work.original, compiled.call], args, kwargs, work.instruments, on_cuda=work.on_cuda, written=written)
    finally:
        route.forward = before


def _exact_and_general(fused: FusedModel, loaded: LoadedWorkload, instruments: Instruments) -> tuple[Timing, Timing] | None:
    """Time the example call through the plan of exactly its sizes, and through what serves its sizes in a range."""
    piece = next((found for found in (table.find(loaded.args, loaded.kwargs) for table in fused.shapes) if found), "")
    if isinstance(piece, str) or not fused.is_applied:
        return None
    graphs = fused.graphs
    was_on = graphs is not None and graphs.is_on
    try:
        if graphs is not None:
            graphs.is_on = False
        ways = [fused.exact_call, piece.call]
        on_cuda = loaded.record.device.startswith("cuda")
        exact, general = time_calls(ways, loaded.args, loaded.kwargs, instruments, on_cuda=on_cuda)
    finally:
        if graphs is not None:
            graphs.is_on = was_on
    return exact, general


def _serving_points(row: ShapePiece) -> list[ShapePoint]:
    return [point for point in row.points if not point.reason]


def _outcome(row: ShapePiece) -> str:
    where, served = ", ".join(one.text for one in row.ranges), _serving_points(row)
    where = f"{row.call} {where}".lstrip()
    if not served:
        return f"{where}: the original ops run. {row.refusal or row.points[0].reason}"
    gains = [point.eager.median_ns / point.ours.median_ns for point in served if point.eager and point.ours]
    speed = f": {', '.join(units.speedup(gain) for gain in gains)}" if gains else ""
    return f"rewrites for {where} at {len(served)} of {len(row.points)} points{speed}"


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
