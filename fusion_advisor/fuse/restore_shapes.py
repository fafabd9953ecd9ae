"""A saved plan's ranges of sizes: pieces are captured and compared, kernels built and checked; nothing is timed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.capture.graph.side_effects import kept_as_it_is
from fusion_advisor.capture.sizes.one_size import runnable_at
from fusion_advisor.capture.sizes.open_capture import OneSizeOnly, OpenCapture, Sizes, capture_open
from fusion_advisor.chains.find import outputs_of
from fusion_advisor.codegen.common.interface import BuiltKernel, Header, KernelBuildFailed, library_origin
from fusion_advisor.codegen.registry import backend as backend_named
from fusion_advisor.errors import PlanMismatch
from fusion_advisor.fuse.decide.instruments import MEASURED
from fusion_advisor.fuse.decide.session import BuiltFusion
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.model_check import check_region
from fusion_advisor.fuse.live.padding_trial import tried_padding
from fusion_advisor.fuse.live.saved_plan import SavedPlan
from fusion_advisor.fuse.plan.plan import PlannedFusion
from fusion_advisor.fuse.plan.size_ranges import ShapeRequest
from fusion_advisor.fuse.points.near_point import finished
from fusion_advisor.fuse.rewrite.graph_rewriter import LayoutChanged
from fusion_advisor.fuse.shapes.decide_at import example_args
from fusion_advisor.fuse.shapes.layouts import change_layouts
from fusion_advisor.fuse.shapes.pieces import OtherPieces, Piece, Served, find_again
from fusion_advisor.fuse.shapes.proved_sizes import prove_sizes
from fusion_advisor.fuse.shapes.ranged_calls import RangedCall, generate_of, ranged_calls, table_of
from fusion_advisor.fuse.shapes.serve import ServedPiece, serving
from fusion_advisor.fuse.shapes.sized_fusion import LooksAtSizes, Workpiece, build, sized
from fusion_advisor.fuse.start.guard_tree import Differs
from fusion_advisor.fuse.start.opened_again import open_again
from fusion_advisor.fuse.start.record import NAME
from fusion_advisor.ir.operand_names import with_names
from fusion_advisor.ir.sized_program import NoOneProgram
from fusion_advisor.lowering.memo import lower_sites
from fusion_advisor.lowering.rules.tables import CannotLower
from fusion_advisor.records import Chain, RenderedKernel, ShapeFusion, ShapePiece, ShapePoint, ShapeRanges, Site
from fusion_advisor.workload.device import current_device
from fusion_advisor.workload.load import LoadedWorkload


def restore_shapes(fused: FusedModel, loaded: LoadedWorkload, saved: SavedPlan) -> None:
    """Let a model serve the ranges that a saved plan was decided for, without a trace where its example call needs none.

    Args:
        fused: the model, with the plan's example call in place; keeps the reason where a piece is traced.
        loaded: the model and that call.
        saved: the plan; without ranges nothing is done.

    Raises:
        PlanMismatch: the model makes other pieces or graphs of the ranges, or a kernel's numbers no longer pass.
    """
    ranges = saved.report.shapes
    if ranges is None:
        return
    if not fused.traced_because and not isinstance(saved.start, str):
        try:
            _serve(fused, loaded, saved, ranges, [*saved.start["pieces"]])
        except _DIFFERENCES as different:
            fused.traced_because = str(different) if isinstance(different, _SENTENCES) else f"{NAME} does not fit this model"
        else:
            return
    _serve(fused, loaded, saved, ranges, None)


_SENTENCES = (Differs, PlanMismatch, LayoutChanged)
_DIFFERENCES = (*_SENTENCES, LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError, AssertionError)
"""What a file may lead to that is read as what we wrote, and that somebody has changed."""


def _serve(fused: FusedModel, loaded: LoadedWorkload, saved: SavedPlan, ranges: ShapeRanges, stored: Any) -> None:
    """Capture all pieces again, or make them of what is stored of them, and build their kernels; None: capture all."""
    asked = ShapeRequest(ranges=ranges.asked, dims=() if any(piece.call for piece in ranges.pieces) else ranges.dims)
    with (
        current_device(torch.device(loaded.record.device)), kept_as_it_is(loaded.model, loaded.args, loaded.kwargs),
        tempfile.TemporaryDirectory(prefix="fusion-advisor-") as folder,
    ):  # fmt: skip
        tables = []
        calls = ranged_calls(loaded, asked)
        for call in calls:
            rows = [piece for piece in ranges.pieces if piece.call == call.name]
            work = _Restoring(loaded, saved, call, Path(folder), stored, pads=fused.graphs is not None and call.may_pad)
            try:
                pieces = find_again(call.ranges, [(row.ranges, _is_served(row)) for row in rows], work.capture)
            except OtherPieces as error:
                raise _mismatch(saved, "the model makes other pieces of the ranges") from error
            fused.traced_because = fused.traced_because or work.traced_because
            served = [work.piece(piece, row) for piece, row in zip(pieces, rows, strict=True)]
            tables.append(table_of(call, served))
    fused.serve(tables, generate_of(loaded, calls))


def _is_served(row: ShapePiece) -> bool:
    return any(not point.reason for point in row.points)


def _mismatch(saved: SavedPlan, detail: str) -> PlanMismatch:
    return PlanMismatch(run=saved.run_dir.name, detail=f"its sizes: {detail}")


class _Restoring:
    """The work on the pieces of one way to call the model."""

    def __init__(
        self, loaded: LoadedWorkload, saved: SavedPlan, ranged: RangedCall, folder: Path,
        stored: Sequence[Any] | None,
        *, pads: bool,
    ) -> None:  # fmt: skip
        self._loaded, self._saved, self._ranged, self._folder, self._pads = loaded, saved, ranged, folder, pads
        self._stored = None if stored is None else [row for row in stored if row["name"] == ranged.name]
        self._built: dict[str, BuiltKernel] = {}
        self.traced_because = ""

    def capture(self, sizes: Sizes) -> OpenCapture:
        """Capture the call at some sizes, without a trace where what that takes is stored.

        Raises:
            Differs: what is stored does not fit this model.
        """
        if self._stored is not None:
            row = next((row for row in self._stored if row["sizes"] == sizes), {"why": f"{NAME} has nothing of these sizes"})
            if "why" not in row:
                model_id = self._loaded.record.model_id
                return open_again(self._loaded.model, self._ranged.at, row, self._ranged.dims, model_id=model_id)
            self.traced_because = f"at {_text(sizes)}: {row['why']}"
        args, kwargs = self._ranged.at(sizes)
        return capture_open(self._loaded.model, args, kwargs, self._ranged.dims, model_id=self._loaded.record.model_id)

    def piece(self, piece: Piece, row: ShapePiece) -> ServedPiece:
        """Build one piece and check it at its points."""
        if piece.opened is None:
            points = [Served(sizes=dict(point.sizes), module=None, reason=point.reason) for point in row.points]
            return serving(replace(piece, refusal=row.refusal), points)
        started = time.perf_counter()
        proved = prove_sizes(piece.opened, piece.box)
        captured = piece.opened.as_captured()
        try:
            change_layouts(piece.opened, row.layouts, piece.box)
        except LooksAtSizes as error:
            raise _mismatch(self._saved, f"{error} takes one size for all") from error
        work = Workpiece(piece, captured=captured)
        if work.graph_hash() != row.graph:
            raise _mismatch(self._saved, f"at {', '.join(one.text for one in row.ranges)} the model makes another graph")
        kernels = {kernel.name: kernel for kernel in row.kernels}
        fusions: dict[ShapeFusion, BuiltFusion] = {}
        served = [self._point(work, point, kernels, fusions) for point in row.points]
        work.forget_records()
        if not row.padded or not self._pads:
            return serving(piece, served)
        paying = [point for point, known in zip(served, row.points, strict=True) if known.pads]
        shown = tried_padding(
            self._ranged, piece.opened, piece.box, paying, proved, MEASURED, spent_s=time.perf_counter() - started, share=1.0,
            names=row.padded,
        )  # fmt: skip
        return serving(piece, served, shown.padding)

    def _point(
        self, work: Workpiece, row: ShapePoint, kernels: Mapping[str, RenderedKernel], known: dict[ShapeFusion, BuiltFusion]
    ) -> Served:
        """Build one point and check it; ``known`` gets the fusions: most stay at several points of a piece."""
        sizes = dict(row.sizes)
        if row.reason:
            return Served(sizes=sizes, module=None, reason=row.reason)
        try:
            for one in row.fusions:
                if one not in known:
                    known[one] = self._fusion(work, one, kernels[one.kernel], f"S{len(known) + 1}")
            module = build(work, [known[one] for one in row.fusions], row.passes)
            served = finished(work, module, sizes, row.passes)
            served = replace(served, in_segments=row.in_segments)
        except (NoOneProgram, CannotLower, KernelBuildFailed, LooksAtSizes, KeyError) as error:
            raise _mismatch(self._saved, f"at {_text(sizes)}: {error}") from error
        args, kwargs = self._ranged.at(sizes)
        written = work.opened.written_in(args, kwargs)
        try:
            given = example_args(work.opened, args, kwargs)
        except OneSizeOnly as error:
            raise _mismatch(self._saved, f"at {_text(sizes)}: {error}") from error
        written.restore()
        region = runnable_at(work.captured, given)
        ours = served.graph_for(tuple(sizes[name] for name in work.names), given).forward
        check = check_region(region, ours, was_passed=True)
        if not check.is_passed:
            raise _mismatch(self._saved, f"at {_text(sizes)} the numbers no longer pass: {check.fused_rel_l2:.1e}")
        return served

    def _fusion(self, work: Workpiece, row: ShapeFusion, kernel: RenderedKernel, name: str) -> BuiltFusion:
        """Render, build and bind one kernel again, for the piece's sites."""
        ops = work.records(work.first_point)
        outputs = outputs_of(ops, list(row.sites))
        lowered = lower_sites(ops, list(zip(row.sites, outputs, strict=True)), is_exact=self._saved.report.is_exact)
        program = lowered[0].program
        if row.match.operands:
            program = with_names(program, row.match.operands, dict(row.match.named_values))
        origin = library_origin(row.match.kernel, row.match.variant) if row.match.is_library else "generated from the chain"
        title = kernel.name.removeprefix("fa_").rpartition("_")[0].removesuffix("_fast")
        header = Header(title=title, summary=f"{row.match.kernel} in one kernel", origin=origin, source=row.match.source)
        planned = PlannedFusion(
            id=name, chain=_chain(name, row.sites), match=row.match, program=program, sites=tuple(lowered), header=header
        )
        rendered = backend_named(kernel.backend).render(program, header, tuning=kernel.parameters, fast_math=kernel.fast_math)
        if rendered.source not in self._built:
            path = self._folder / f"{rendered.entry}{rendered.suffix}"
            self._built[rendered.source] = backend_named(kernel.backend).build(rendered, path)
        one_size = replace(kernel, name=rendered.entry)
        fusion = BuiltFusion(planned=planned, kernel=one_size, sites=(), refusals=(), built=self._built[rendered.source])
        found = sized(work, fusion)
        if found.kernel.name != kernel.name:
            raise NoOneProgram(f"{row.match.kernel} would be another kernel ({found.kernel.name}, not {kernel.name})")
        return found


def _chain(name: str, sites: Sequence[tuple[int, ...]]) -> Chain:
    places = tuple(
        Site(op_indices=indices, module_path="", source_file="", source_line=0, source_text="", device_ns=0) for indices in sites
    )
    return Chain(
        id=name, ops=(), sites=places, launches=0, device_ns=0, share=0.0, moved_bytes=0, floor_bytes=0, floor_ns=0,
        saving_bound_ns=0, is_reduction=False, dtype="", shape=(),
    )  # fmt: skip


def _text(sizes: Sizes) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
