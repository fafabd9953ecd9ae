"""A plan that was found to pay once, put in place again without profiling or timing: same graph, same kernels, checked anew.

What makes a plan portable is the capture beside it: if the model of today gives the same op graph (ops, arguments, layouts), the
sites and kernels of that run are those of this one. If it does not, nothing is guessed.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fusion_advisor.capture.graph.side_effects import kept_as_it_is
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.codegen.common.interface import BuiltKernel, KernelBuildFailed, Rendered
from fusion_advisor.codegen.gemm.problem import GemvConfig, entry_of
from fusion_advisor.codegen.registry import backend as backend_named
from fusion_advisor.errors import AdvisorError, PlanMismatch, UnreadableReport
from fusion_advisor.files.safe_name import path_inside
from fusion_advisor.fuse.cuda_graph.recording import CudaRecorder
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.rebind import CannotMove, on_changed_graphs
from fusion_advisor.fuse.decide.session import PASSES, Bench, BuiltFusion, BuiltLinear
from fusion_advisor.fuse.decide.try_fusions import kept_passes
from fusion_advisor.fuse.live.cuda_graph_choice import TITLE as GRAPH_TITLE
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.specialize import FEW_ROWS, Kept, gemm_rows
from fusion_advisor.fuse.plan.plan import PlannedFusion, recall
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.fuse.rewrite.graph_rewriter import fused_call
from fusion_advisor.fuse.rewrite.region_copy import ChangedRegion
from fusion_advisor.fuse.stages import try_epilogues
from fusion_advisor.fuse.stages.try_linear_kernels import Kind, build, check_first, find_kinds, header_of, install
from fusion_advisor.fuse.stages.try_merged_gemms import merge_all
from fusion_advisor.fuse.stages.try_slice_pushdown import narrow_all
from fusion_advisor.records import (
    EPILOGUE,
    MERGED,
    NARROWED,
    Capture,
    Fusion,
    GraphRewrite,
    Match,
    OpNode,
    RenderedKernel,
    Report,
    Status,
    TensorMeta,
    WarmUp,
)
from fusion_advisor.records.serialize import read_capture, read_report, write_capture, write_report
from fusion_advisor.records.soundness import Unsound, check_plan
from fusion_advisor.runtime.deep_stack import in_one_piece
from fusion_advisor.runtime.gc_pause import collector_paused
from fusion_advisor.verify.check_chain import check_calls, layout_of
from fusion_advisor.workload.device import current_device, memory_bytes
from fusion_advisor.workload.load import LoadedWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlan:
    """What a run kept."""

    run_dir: Path
    capture: Capture
    report: Report
    fusions: tuple[PlannedFusion, ...]
    """Kept chain fusions, with their programs and sites."""
    passes: tuple[str, ...]
    """Kept graph passes."""
    narrow: GraphRewrite | None = None
    """The leaving out of rows that nobody reads, if it was kept."""
    merge: GraphRewrite | None = None
    """The merging of GEMMs, if it was kept."""
    epilogue: GraphRewrite | None = None
    """The activations that run in GEMMs, if that was kept."""
    gemvs: tuple[Fusion, ...] = ()
    """Kept kernels of linears."""
    has_graph: bool = False
    """Whether a CUDA graph around the step was kept."""


def load_plan(run_dir: str | Path) -> SavedPlan:
    """Read what a run kept; needs no GPU.

    The plan is complete: names of kernels from the run's ``--kernels`` directories, ``--fast-math`` and launch parameters are in
    it, so none of them is given again, and a directory that is gone is not missed.

    Args:
        run_dir: a run directory of ``apply``, with its ``report.json`` and ``capture.json.gz``.

    Raises:
        UnreadableReport: a file is missing, truncated or not one of ours.
    """
    # In the process that captured, the collector would walk all that dynamo left behind.
    with collector_paused():
        return _load(Path(run_dir))


def _load(folder: Path) -> SavedPlan:
    capture, report = read_capture(folder / "capture.json.gz"), read_report(folder / "report.json")
    try:
        check_plan(capture, report)
    except Unsound as error:
        raise UnreadableReport(name=folder / "report.json", detail=str(error)) from error
    narrow, merge, in_epilogues = (
        next((row for row in report.rewrites if row.name == title and row.status is Status.KEPT), None)
        for title in (NARROWED, MERGED, EPILOGUE)
    )
    # What a GEMM took in is found by its chain (activations), and other lengths need its kernel. In plans of few rows GEMVs took
    # nearly all in, which every start would build for batches that may never come: those have what was kept alone.
    is_absorbed_needed = in_epilogues is not None or gemm_rows(capture.ops) > FEW_ROWS
    needed = (Status.KEPT, Status.ABSORBED) if is_absorbed_needed else (Status.KEPT,)
    kept = {row.chain_id for row in report.fusions if row.chain_id and row.status in needed}
    answers = {answer.chain_id: answer for answer in report.answers if isinstance(answer, Match)}
    try:
        fusions = tuple(
            recall(capture, [chain for chain in report.chains if chain.id in kept], answers, is_exact=report.is_exact)
        )
    except AdvisorError:
        raise
    except Exception as error:  # lowering trusts a graph that we captured; this one was changed since
        detail = f"its chains cannot be made of the ops in capture.json.gz ({type(error).__name__}: {error})"
        raise UnreadableReport(name=folder / "report.json", detail=detail) from error
    return SavedPlan(
        run_dir=folder,
        capture=capture,
        report=report,
        fusions=fusions,
        passes=tuple(kept_passes(report.rewrites)),
        narrow=narrow,
        merge=merge,
        epilogue=in_epilogues,
        gemvs=tuple(fusion for fusion in report.fusions if fusion.status is Status.KEPT and not fusion.chain_id),
        has_graph=any(row.name == GRAPH_TITLE and row.status is Status.KEPT for row in report.rewrites),
    )


def apply_plan(loaded: LoadedWorkload, saved: SavedPlan, clock: PhaseClock | None = None) -> FusedModel:
    """Put a saved plan into a live model: capture, build, check every kernel's numbers, install.

    Args:
        loaded: the model and an example call.
        saved: from :func:`load_plan`.
        clock: of the phases.

    Raises:
        PlanMismatch: this model or this call gives another graph, another device, or a kernel's numbers no longer pass.
        CannotCapture: dynamo captured nothing.
    """
    device = torch.device(loaded.record.device)
    kind = device.type
    if kind != saved.capture.environment.device_kind:
        raise PlanMismatch(
            run=saved.run_dir.name, detail=f"it was made on {saved.capture.environment.device_kind}, this is {kind}"
        )
    clock = clock or PhaseClock(Progress())
    # Dynamo leaves a heap behind that takes half a second to walk.
    with current_device(device), collector_paused(), kept_as_it_is(loaded.model, loaded.args, loaded.kwargs):
        return in_one_piece(lambda: _apply(loaded, saved, clock))


def measure_warm_up(loaded: LoadedWorkload, capture: Capture, report: Report, bench: Bench) -> WarmUp:
    """Save a plan, put it in place as another process would, run one step, and take it out again.

    Args:
        loaded: the model and its inputs.
        capture: of this run.
        report: of this run, with what was kept.
        bench: of this run; its inputs are put back as they were.

    Raises:
        PlanMismatch: the plan does not hold a second time.
    """
    clock = PhaseClock(Progress())
    bench.live.written.restore()
    with tempfile.TemporaryDirectory(prefix="fusion-advisor-") as folder:
        write_capture(capture, Path(folder) / "capture.json.gz")
        write_report(report, Path(folder) / "report.json")
        bench.wait()
        gc.collect()  # what this run has made so far is no other process's to walk: 0.6 s of it were counted once
        started = time.perf_counter()
        with clock.phase("read the plan"):
            saved = load_plan(folder)
        fused = apply_plan(loaded, saved, clock)
        try:
            with clock.phase("first step"), torch.no_grad():
                fused(*loaded.args, **loaded.kwargs)
                bench.wait()
            taken_s = time.perf_counter() - started
        finally:
            fused.revert()
    bench.live.written.restore()
    if fused.fallbacks:
        raise PlanMismatch(run="this run", detail=f"its first step ran the original ops: {next(iter(fused.fallbacks))}")
    built = [kernel.build_ns for fusion in report.fusions if fusion.status is Status.KEPT for kernel in fusion.rendered]
    between_s = round(taken_s - sum(phase_s for _, phase_s in clock.durations_s), 3)
    between = (("between them", between_s),) if between_s > 0 else ()
    return WarmUp(phases_s=(*clock.durations_s, *between), build_s=round(sum(built) / 1e9, 3))


def _apply(loaded: LoadedWorkload, saved: SavedPlan, clock: PhaseClock) -> FusedModel:
    with clock.phase("capture"):
        bench = _captured(loaded, saved, with_lines=False)
        live = bench.live
        if first_difference(saved.capture.ops, bench.ops) is not None:
            difference = first_difference(saved.capture.ops, _captured(loaded, saved, with_lines=True).ops)
            detail = _of_site(saved, *difference) if difference else "the model gives another graph each time"
            raise PlanMismatch(run=saved.run_dir.name, detail=detail)
    with clock.phase("kernels"):
        fusions = list(saved.fusions)
        if saved.narrow is not None:
            bench, fusions = _narrowed(bench, fusions, saved, saved.narrow)
        if saved.merge is not None:
            bench, fusions = _merged(bench, fusions, saved, saved.merge, loaded)
        placed, fast_math = _in_epilogues(bench, fusions, saved)
        kinds = find_kinds(bench) if saved.gemvs else []
        firsts = [*(one.place for one in placed[:1]), *(kind.places[0] for kind in kinds)]
        # Op by op the host takes a tenth of a second for a step of 28 layers, so it is run once for all kernels.
        bench.observe(fusions, also=[index for place in firsts for index in place.inputs])
        built = _built(bench, fusions, saved)
        gemvs = _gemvs(bench, kinds, saved)
        linears = [*_checked(bench, placed, saved, fast_math=fast_math), *gemvs]
        bench.values.clear()
    with clock.phase("install"):
        variant = bench.build(built, [name for name in PASSES if name in saved.passes], linears)
        kept = Kept(
            fusions=tuple(built),
            passes=saved.passes,
            rows=gemm_rows(bench.ops),
            on_cuda=bench.on_cuda,
            has_merged=saved.merge is not None,
            has_gemvs=bool(gemvs),
            has_epilogues=bool(placed),
            fast_math=fast_math,
            tolerance=saved.report.tolerance,
        )
        graphs = Graphs(CudaRecorder()) if saved.has_graph and bench.on_cuda else None
        fused = FusedModel(
            loaded.model, bench.live.regions, variant.modules, loaded.args, loaded.kwargs, graphs=graphs, kept=kept, live=live
        )
        live.written.restore()
        fused.report = saved.report
        return fused.apply()


def _captured(loaded: LoadedWorkload, saved: SavedPlan, *, with_lines: bool) -> Bench:
    live = capture_regions(
        loaded.model, loaded.args, loaded.kwargs, model_id=loaded.record.model_id, with_lines=with_lines
    )  # fmt: skip
    return Bench(live, on_cuda=saved.capture.environment.device_kind == "cuda")


def _built(bench: Bench, fusions: Sequence[PlannedFusion], saved: SavedPlan) -> list[BuiltFusion]:
    """Build the kernels again as they were rendered, and check each on its first site's own tensors.

    Nothing is chosen here: launch parameters and fast math are those of the run, whatever this machine has tuned since.
    """
    rows = {row.chain_id: row for row in saved.report.fusions}
    made: dict[str, BuiltKernel] = {}
    built = []
    for planned in fusions:
        row = rows[planned.chain.id]
        try:
            kernel, rendered = _rendered(planned, row.rendered)
            if rendered.source not in made:
                made[rendered.source] = backend_named(kernel.backend).build(rendered, path_inside(saved.run_dir, kernel.path))
            one = made[rendered.source]
            chain, roots = bench.first_site(planned)
            outputs = [bench.ops[index].outputs[0] for index in planned.sites[0].outputs]
            launch, inputs = one.bind(planned.program), list(map(layout_of, roots))
            call = fused_call(rendered.entry, launch, inputs, outputs, in_place=chain.in_place, is_poisoned=True)
            numerics = check_calls(
                [(chain, call, roots)],
                inputs="the first site's own tensors",
                fast_math=kernel.fast_math,
                tolerance=saved.report.tolerance,
            )
        except KernelBuildFailed as failure:
            raise PlanMismatch(run=saved.run_dir.name, detail=str(failure)) from failure
        if not numerics.is_passed:
            error = f"relative error {numerics.fused_rel_l2:.2e} against float64, the original ops {numerics.eager_rel_l2:.2e}"
            raise PlanMismatch(run=saved.run_dir.name, detail=f"{row.id} {row.kernel}: its numbers no longer pass: {error}")
        installed = bench.install(planned, kernel, one)
        for refusal in installed.refusals:
            if refusal not in row.receipt.refusals:
                detail = f"{row.id} {row.kernel} has no place at {refusal}; the other sites were left alone too"
                raise PlanMismatch(run=saved.run_dir.name, detail=detail)
        built.append(installed)
    return built


def _rendered(planned: PlannedFusion, kernels: Sequence[RenderedKernel]) -> tuple[RenderedKernel, Rendered]:
    """Render a fusion's kernel again; a fusion whose sites differ in layout has several, told apart by name."""
    found = [
        backend_named(kernel.backend).render(
            planned.program, planned.header, tuning=kernel.parameters, fast_math=kernel.fast_math
        )
        for kernel in kernels
    ]
    found = [replace(one, text=kernel.source) for kernel, one in zip(kernels, found, strict=True)]
    pairs = list(zip(kernels, found, strict=True))
    return next((pair for pair in pairs if pair[0].name == pair[1].entry), pairs[0])


def _narrowed(
    bench: Bench, fusions: Sequence[PlannedFusion], saved: SavedPlan, narrow: GraphRewrite
) -> tuple[Bench, list[PlannedFusion]]:
    for regions in narrow_all(bench):
        if sum(one.changed for one in regions) == narrow.sites:
            return _on_changed(bench, regions, fusions, saved)
    raise PlanMismatch(run=saved.run_dir.name, detail="rows that it leaves out cannot be left out here")


def _merged(
    bench: Bench, fusions: Sequence[PlannedFusion], saved: SavedPlan, merge: GraphRewrite, loaded: LoadedWorkload
) -> tuple[Bench, list[PlannedFusion]]:
    free_bytes, _ = memory_bytes(torch.device(loaded.record.device))
    regions = merge_all(bench, may_copy=merge.held_bytes > 0, free_bytes=free_bytes)
    if sum(one.changed for one in regions) != merge.sites:
        reasons = [reason for one in regions for reason in one.refusals]
        raise PlanMismatch(run=saved.run_dir.name, detail=f"GEMMs that it merged cannot be merged here: {reasons[0]}")
    return _on_changed(bench, regions, fusions, saved)


def _in_epilogues(bench: Bench, fusions: Sequence[PlannedFusion], saved: SavedPlan) -> tuple[list[try_epilogues.Placed], bool]:
    """Find the activations that the plan moved, and whether it took one GELU for the other."""
    if saved.epilogue is None:
        return [], False
    for fast_math in (False, True):
        placed, refusals = try_epilogues.find_places(bench, fusions, fast_math=fast_math)
        if len(placed) == saved.epilogue.sites:
            return placed, fast_math
    why = f": {refusals[0]}" if refusals else ""
    raise PlanMismatch(run=saved.run_dir.name, detail=f"activations that it moved into GEMMs cannot be moved here{why}")


def _checked(bench: Bench, placed: Sequence[try_epilogues.Placed], saved: SavedPlan, *, fast_math: bool) -> list[BuiltLinear]:
    if not placed:
        return []
    if not try_epilogues.check_first(bench, placed, fast_math=fast_math, tolerance=saved.report.tolerance).is_passed:
        raise PlanMismatch(run=saved.run_dir.name, detail=f"{placed[0].call.__name__}: its numbers no longer pass")
    return [try_epilogues.built_of(placed)]


def _on_changed(
    bench: Bench, regions: Sequence[ChangedRegion], fusions: Sequence[PlannedFusion], saved: SavedPlan
) -> tuple[Bench, list[PlannedFusion]]:
    try:
        new, found = on_changed_graphs(bench, regions, fusions)
    except CannotMove as refusal:
        raise PlanMismatch(run=saved.run_dir.name, detail=str(refusal)) from refusal
    return new, list(itertools.chain.from_iterable(found))


def _gemvs(bench: Bench, kinds: Sequence[Kind], saved: SavedPlan) -> list[BuiltLinear]:
    """Build the kernels of linears again, with the configurations that were chosen, and check their numbers."""
    found: list[BuiltLinear] = []
    for kind in kinds:
        header = header_of(kind.title)
        for row in (row for row in saved.gemvs if row.kernel == kind.title):
            kernel = row.rendered[0]
            config = GemvConfig.read(kernel.tuning)
            # A kernel is named after all that is constant in it.
            if entry_of(kind.problem, header, config) != kernel.name:
                continue
            try:
                path = path_inside(saved.run_dir, f"kernels/{row.id}_{kind.title}")
                made = build(kind.problem, header, config, path, tuning=kernel.tuning)
                numerics = check_first(bench, kind, made, tolerance=saved.report.tolerance)
            except KernelBuildFailed as failure:
                raise PlanMismatch(run=saved.run_dir.name, detail=str(failure)) from failure
            if not numerics.is_passed:
                raise PlanMismatch(run=saved.run_dir.name, detail=f"{kind.title}: its numbers no longer pass")
            found.append(install(bench, kind, made, name=row.id))
    missing = [row.kernel for row in saved.gemvs if row.id not in {gemv.id for gemv in found}]
    if missing:
        raise PlanMismatch(run=saved.run_dir.name, detail=f"this model has no linears for {', '.join(missing)}")
    return found


def first_difference(before: tuple[OpNode, ...], now: list[OpNode]) -> tuple[int, str] | None:
    """Say where two captured graphs differ, or None when they are the same ops on the same layouts.

    Where in its storage a model's own tensor begins is no part of its layout: a weight may lie beside others or alone.

    Returns:
        The op's index and a sentence.
    """
    for old, new in zip(before, now, strict=False):
        same = (old.target, old.args, old.kwargs, old.alias_of) == (new.target, new.args, new.kwargs, new.alias_of)
        if not same or _layouts(before, old) != _layouts(now, new):
            what = [_shown(old), _shown(new)]
            if what[0] == what[1]:
                what = [f"{op.target}{op.args} {dict(op.kwargs) or ''}".rstrip() for op in (old, new)]
            return new.index, f"op {new.index}{_place(new)} is {what[1]}, the plan has {what[0]}"
    if len(before) != len(now):
        return min(len(before), len(now)) - 1, f"this graph has {len(now)} ops, the plan's has {len(before)}"
    return None


def _shown(op: OpNode) -> str:
    results = ", ".join(f"{meta.dtype}{list(meta.shape)} with strides {list(meta.stride)}" for meta in op.outputs)
    return f"{op.target} -> {results}" if results else op.target


def _place(op: OpNode) -> str:
    where = " at ".join(part for part in (op.module_path, f"{op.source_file}:{op.source_line}" if op.source_file else "") if part)
    return f" ({where})" if where else ""


def _of_site(saved: SavedPlan, index: int, difference: str) -> str:
    """Name the kept fusion, and the site of it, that an op of the plan belongs to."""
    for fusion in saved.fusions:
        for number, site in enumerate(fusion.chain.sites, start=1):
            if index in site.op_indices:
                where = f"{fusion.id} {fusion.match.kernel}, site {number} of {len(fusion.chain.sites)}"
                return f"{difference}; that is in {where}{f' ({site.module_path})' if site.module_path else ''}"
    return difference


def _layouts(ops: Sequence[OpNode], op: OpNode) -> list[TensorMeta]:
    owner = op if op.alias_of is None else ops[op.alias_of]
    begins = owner.outputs[0].offset if owner.outputs else 0
    return [replace(meta, offset=meta.offset - begins) for meta in op.outputs]
