"""A saved plan put in place again without profiling or timing: same graph, same kernels, checked again.

The capture makes a plan portable: if the model of today gives the same op graph (ops, arguments, layouts), the sites and kernels
of that run are right for this model. If it does not, nothing is guessed.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from fusion_advisor.capture.graph.side_effects import kept_as_it_is
from fusion_advisor.capture.graph.tracer import LiveCapture, capture_regions
from fusion_advisor.capture.layout_trial import drop_layouts
from fusion_advisor.capture.loops.one_op import fold_loops
from fusion_advisor.errors import AdvisorError, PlanMismatch, WeightsApart
from fusion_advisor.fuse.cuda_graph.recording import CudaRecorder
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.session import Bench, BuiltLinear, Variant, members_of
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.graph_difference import first_difference, named_site
from fusion_advisor.fuse.live.module_guard import refuse_in_vain
from fusion_advisor.fuse.live.restore_kernels import (
    MakesKernels,
    build_epilogues,
    build_fusions,
    build_linears,
    build_scans,
    build_sums,
    find_epilogues,
    join_by_torch,
    refuse_other_ranks,
)
from fusion_advisor.fuse.live.saved_plan import ReusablePlan, SavedPlan, gemm_rows, load_plan
from fusion_advisor.fuse.passes.cuda_graph import CUDA_GRAPH
from fusion_advisor.fuse.passes.gemm_epilogue import GEMM_EPILOGUE
from fusion_advisor.fuse.passes.linear_sites import LINEAR_KERNELS
from fusion_advisor.fuse.passes.pad_gemm import ODD_WIDTH_GEMM, PAD_GEMM
from fusion_advisor.fuse.passes.registry import LAYOUT_CHANGES, kept_passes
from fusion_advisor.fuse.plan.plan import PlannedFusion
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.fuse.rewrite.collective_kernels import ALL_REDUCE_NORM
from fusion_advisor.fuse.rewrite.record import LayoutRewrite
from fusion_advisor.fuse.rewrite.scan_kernels import SCAN_KERNELS
from fusion_advisor.fuse.stages.epilogue_sites import Placed
from fusion_advisor.fuse.stages.linear_kernels import Made, build
from fusion_advisor.fuse.stages.linear_kinds import find_kinds
from fusion_advisor.fuse.start.guard_tree import Differs
from fusion_advisor.fuse.start.made_again import Started, start_again
from fusion_advisor.fuse.start.record import write_start
from fusion_advisor.records import Capture, Report, Status, WarmUp
from fusion_advisor.records.serialize import write_capture, write_report
from fusion_advisor.runtime.deep_stack import in_one_piece
from fusion_advisor.runtime.gc_pause import collector_paused
from fusion_advisor.workload.device import current_device, memory_bytes
from fusion_advisor.workload.load import LoadedWorkload
from fusion_advisor.workload.weight_packing import lies_laid_out


def apply_plan(
    loaded: LoadedWorkload,
    saved: SavedPlan,
    clock: PhaseClock | None = None,
    *,
    build_linear: Callable[..., Made] = build,
    group_kernels: MakesKernels = join_by_torch,
) -> FusedModel:
    """Put a saved plan into a live model: capture, build, check every kernel's numbers, install.

    Args:
        loaded: the model and an example call.
        saved: from :func:`load_plan`.
        clock: of the phases.
        build_linear: builds a kernel of a linear at a configuration.
        group_kernels: makes the kernels in which ranks meet. Where the plan has some, all ranks put it in place together.

    Raises:
        PlanMismatch: this model or this call gives another graph, another device, or a kernel's numbers no longer pass.
        WeightsApart: its merged GEMMs need weights that lie together.
        ModelInTraining, AutocastAround: in which every call would run the original ops.
        CannotCapture: dynamo captured nothing.
    """
    refuse_in_vain(loaded.model, loaded.record.model_id)
    device = torch.device(loaded.record.device)
    kind = device.type
    if kind != saved.capture.environment.device_kind:
        raise PlanMismatch(
            run=saved.run_dir.name, detail=f"it was made on {saved.capture.environment.device_kind}, this is {kind}"
        )
    if saved.sums:
        refuse_other_ranks(saved, dist.get_world_size() if dist.is_initialized() else 1)
    clock = clock or PhaseClock(Progress())
    # Dynamo keeps so many objects that the collector takes half a second to walk them.
    with current_device(device), collector_paused(), kept_as_it_is(loaded.model, loaded.args, loaded.kwargs):
        return in_one_piece(lambda: _put_in(loaded, saved, clock, build_linear, group_kernels))


def measure_warm_up(
    loaded: LoadedWorkload,
    capture: Capture,
    report: Report,
    bench: Bench,
    *,
    worst: Callable[[str], str] = str,
    group_kernels: MakesKernels | None = None,
) -> WarmUp:
    """Save a plan, put it in place as another process would, run one step, and take it out again.

    Args:
        loaded: the model and its inputs.
        capture: of this run.
        report: of this run, with what was kept.
        bench: of this run; its inputs are put back as they were.
        worst: given why the plan does not hold, or an empty text, returns what counts: ranks run a step together or not at all.
        group_kernels: makes the kernels in which ranks meet; None: as another process would.

    Raises:
        PlanMismatch: the plan does not hold a second time.
    """
    clock = PhaseClock(Progress())
    bench.live.written.restore()
    with tempfile.TemporaryDirectory(prefix="fusion-advisor-") as folder:
        write_capture(capture, Path(folder) / "capture.json.gz")
        write_report(report, Path(folder) / "report.json")
        write_start(loaded, bench.live, Path(folder))
        bench.wait()
        gc.collect()  # what this run has made so far is no other process's to walk: 0.6 s of it were counted once
        started = time.perf_counter()
        with clock.phase("read the plan"):
            saved = load_plan(folder)
        fused = _applied_on_all(loaded, saved, clock, worst, group_kernels or join_by_torch)
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


def _applied_on_all(
    loaded: LoadedWorkload, saved: SavedPlan, clock: PhaseClock, worst: Callable[[str], str], group_kernels: MakesKernels
) -> FusedModel:
    """Put a plan in place, where that is possible for all who run the step."""
    try:
        fused = apply_plan(loaded, saved, clock, group_kernels=group_kernels)
    except AdvisorError as error:
        worst(str(error))
        raise
    if problem := worst(""):
        fused.revert()
        raise PlanMismatch(run="this run", detail=problem)
    return fused


def put_together(
    loaded: LoadedWorkload, saved: SavedPlan, clock: PhaseClock, *, build_linear: Callable[..., Made] = build,
    group_kernels: MakesKernels = join_by_torch, with_lines: bool = False, may_start: bool = False,
) -> Restored:  # fmt: skip
    """Capture the model again and build a plan's kernels for it; the model itself stays as it is.

    Args:
        loaded: the model and an example call.
        saved: from :func:`load_plan`.
        clock: of the phases.
        build_linear: builds a kernel of a linear at a configuration.
        group_kernels: makes the kernels in which ranks meet.
        with_lines: note the source lines of each op, which takes an eighth longer.
        may_start: take the graph that the run stored, where the model is as it was, in place of a trace.

    Raises:
        PlanMismatch: the model gives another graph, or a kernel's numbers no longer pass.
        WeightsApart: its merged GEMMs need weights that lie together.
    """
    reason = ""
    if may_start:
        restored = _without_trace(loaded, saved, clock, build_linear)
        if isinstance(restored, Restored):
            return restored
        reason = restored
    with clock.phase("capture"):
        bench = _captured(loaded, saved, with_lines=with_lines)
        if first_difference(saved.capture.ops, bench.ops) is not None:
            difference = first_difference(saved.capture.ops, _captured(loaded, saved, with_lines=True).ops)
            detail = named_site(saved.fusions, *difference) if difference else "the model gives another graph each time"
            raise PlanMismatch(run=saved.run_dir.name, detail=detail)
    with clock.phase("kernels"):
        return replace(_restored(bench, loaded, saved, build_linear, group_kernels), traced_because=reason)


def _without_trace(
    loaded: LoadedWorkload, saved: SavedPlan, clock: PhaseClock, build_linear: Callable[..., Made]
) -> Restored | str:
    """Build a plan's kernels on the graph that its run stored; return a reason where the model has to be traced."""
    if dist.is_initialized() or saved.sums:
        return "the step is one of several ranks'"
    if isinstance(saved.start, str):
        return saved.start
    try:
        with clock.phase("capture"):
            started = start_again(loaded, saved.start)
            drop_layouts(started.live, but=saved.rewrites)
            bench = Bench(started.live, on_cuda=saved.capture.environment.device_kind == "cuda")
            difference = first_difference(saved.capture.ops, bench.ops)
            if difference is not None:
                return f"the stored graph is not the plan's: {difference[1]}"
        with clock.phase("kernels"):
            return _restored(bench, loaded, saved, build_linear, join_by_torch, started)
    except Differs as different:
        return str(different)


def _put_in(
    loaded: LoadedWorkload, saved: SavedPlan, clock: PhaseClock, build_linear: Callable[..., Made], group_kernels: MakesKernels
) -> FusedModel:
    restored = put_together(
        loaded, saved, clock, build_linear=build_linear, group_kernels=group_kernels, may_start=True
    )  # fmt: skip
    with clock.phase("install"):
        bench, plan, live = restored.bench, restored.plan, restored.live
        variant = restored.variant(saved)
        require_room(loaded, saved, variant)
        has_graph = CUDA_GRAPH.id in saved.rewrites and bench.on_cuda
        fused = FusedModel(
            loaded.model, bench.live.regions, variant.modules, loaded.args, loaded.kwargs,
            graphs=Graphs(CudaRecorder()) if has_graph else None, plan=plan, live=live,
        )  # fmt: skip
        live.written.restore()
        fused.report, fused.traced_because = saved.report, restored.traced_because
        clock.progress.note(fused.started)
        return fused.apply()


def require_room(loaded: LoadedWorkload, saved: SavedPlan, variant: Variant) -> None:
    """Refuse a model whose weights have not the room that the plan's had: its GEMMs would silently be other ones.

    Raises:
        WeightsApart: fewer products were changed than in the plan's run.
    """
    for rewrite in (PAD_GEMM, ODD_WIDTH_GEMM):
        row = saved.rewrites.get(rewrite.id)
        if row is not None and variant.changed[rewrite.id] < row.sites and not lies_laid_out(loaded.model):
            raise WeightsApart(run=saved.run_dir.name, title=rewrite.title)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A plan's kernels on the graphs that it had changed."""

    live: LiveCapture
    """Of the model as it is."""
    bench: Bench
    linears: list[BuiltLinear]
    plan: ReusablePlan
    traced_because: str = ""
    """Why the model was traced; empty where it was not, or where nobody asked for that."""

    def variant(self, saved: SavedPlan) -> Variant:
        """Return the graphs with everything in them that the plan kept.

        Args:
            saved: the plan that was restored.
        """
        return self.bench.build(self.plan.fusions, kept_passes(saved.report.rewrites), self.linears)


def _restored(
    bench: Bench, loaded: LoadedWorkload, saved: SavedPlan, build_linear: Callable[..., Made], group_kernels: MakesKernels,
    started: Started | None = None,
) -> Restored:  # fmt: skip
    """Change the graphs as the plan did, and build and check its kernels on them."""
    fusions, live = list(saved.fusions), bench.live
    free_bytes, _ = memory_bytes(torch.device(loaded.record.device))
    for rewrite in LAYOUT_CHANGES.values():
        if rewrite.id in saved.rewrites:
            bench, fusions = _changed(bench, fusions, rewrite, loaded, saved, free_bytes=free_bytes)
    placed: list[Placed] = []
    fast_math = False
    if GEMM_EPILOGUE.id in saved.rewrites:
        placed, fast_math = find_epilogues(bench, fusions, saved, saved.rewrites[GEMM_EPILOGUE.id])
    device = torch.device(loaded.record.device)
    sums = build_sums(bench, saved, device, {i for one in placed for i in one.place.members}, group_kernels)
    kinds = find_kinds(bench, members_of(sums)) if saved.linears else []
    firsts = [*(one.place for one in placed[:1]), *(kind.places[0] for kind in kinds)]
    # Op by op the host takes a tenth of a second for a step of 28 layers, so it is run once for all kernels.
    observe = partial(bench.observe, fusions, also=[index for place in firsts for index in place.inputs])
    if started is None:
        observe()
    else:
        started.compare(observe)
    built = build_fusions(bench, fusions, saved)
    gemvs = build_linears(bench, kinds, saved, build_linear)
    linears = [*build_epilogues(bench, placed, saved, fast_math=fast_math), *sums, *gemvs]
    scans = build_scans(bench, saved, device, members_of(linears))
    linears += scans
    bench.values.clear()
    made = ((LINEAR_KERNELS.id, gemvs), (SCAN_KERNELS.id, scans), (ALL_REDUCE_NORM.id, sums))
    kept = (*saved.rewrites, *(name for name, kernels in made if kernels))
    plan = ReusablePlan(
        fusions=tuple(built), rewrites=kept, rows=gemm_rows(bench.ops), on_cuda=bench.on_cuda, fast_math=fast_math,
        tolerance=saved.report.tolerance,
    )  # fmt: skip
    return Restored(live=live, bench=bench, linears=linears, plan=plan)


def _changed(
    bench: Bench, fusions: list[PlannedFusion], rewrite: LayoutRewrite, loaded: LoadedWorkload, saved: SavedPlan, *,
    free_bytes: int,
) -> tuple[Bench, list[PlannedFusion]]:  # fmt: skip
    """Change the graphs as the plan did."""
    from fusion_advisor.fuse.decide.rebind import CannotMove  # with all that times a step
    from fusion_advisor.fuse.stages.try_layout_change import change_again

    try:
        return change_again(bench, fusions, rewrite, saved.rewrites[rewrite.id], free_bytes=free_bytes)
    except CannotMove as refusal:
        if not lies_laid_out(loaded.model):
            raise WeightsApart(run=saved.run_dir.name, title=rewrite.title) from refusal
        raise PlanMismatch(run=saved.run_dir.name, detail=str(refusal)) from refusal


def _captured(loaded: LoadedWorkload, saved: SavedPlan, *, with_lines: bool) -> Bench:
    live = capture_regions(
        loaded.model, loaded.args, loaded.kwargs, model_id=loaded.record.model_id, with_lines=with_lines
    )  # fmt: skip
    fold_loops(live)
    drop_layouts(live, but=saved.rewrites)
    return Bench(live, on_cuda=saved.capture.environment.device_kind == "cuda")
