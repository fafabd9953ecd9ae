"""A plan that was found to pay once, put in place again without profiling or timing: same graph, same kernels, checked anew.

What makes a plan portable is the capture beside it: if the model of today gives the same op graph (ops, arguments, layouts), the
sites and kernels of that run are those of this one. If it does not, nothing is guessed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fusion_advisor.capture.graph import capture_regions
from fusion_advisor.errors import PlanMismatch
from fusion_advisor.fuse.bench import PASSES, Bench, BuiltFusion, BuiltGemv
from fusion_advisor.fuse.gemvs import build, check, find_kinds, header_of, install, observe
from fusion_advisor.fuse.graph_choice import TITLE as GRAPH_TITLE
from fusion_advisor.fuse.graphed import CudaRecorder, Graphs
from fusion_advisor.fuse.merging import TITLE, CannotMove, merge_all, mover, on_merged
from fusion_advisor.fuse.model import FusedModel
from fusion_advisor.fuse.plan import PlannedFusion, recall
from fusion_advisor.fuse.progress import PhaseClock, Progress
from fusion_advisor.fuse.select import kept_passes
from fusion_advisor.fuse.specialize import Kept, gemm_rows
from fusion_advisor.fuse.trial import try_fusion
from fusion_advisor.library.gemv import GemvConfig, entry_of
from fusion_advisor.library.patterns import library_patterns
from fusion_advisor.library.source import KernelBuildFailed
from fusion_advisor.records import Capture, Fusion, GraphRewrite, Match, OpNode, Report, Status, TensorMeta, WarmUp
from fusion_advisor.serialize import read_capture, read_report, write_capture, write_report
from fusion_advisor.workload.device import memory_bytes
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
    merge: GraphRewrite | None = None
    """The merging of GEMMs, if it was kept."""
    gemvs: tuple[Fusion, ...] = ()
    """Kept kernels of linears on few rows."""
    has_graph: bool = False
    """Whether a CUDA graph around the step was kept."""


def load_plan(run_dir: str | Path) -> SavedPlan:
    """Read what a run kept; needs no GPU.

    Args:
        run_dir: a run directory of ``apply``, with its ``report.json`` and ``capture.json.gz``.

    Raises:
        UnreadableReport: a file is missing, truncated or not one of ours.
    """
    folder = Path(run_dir)
    capture, report = read_capture(folder / "capture.json.gz"), read_report(folder / "report.json")
    kept = {fusion.chain_id for fusion in report.fusions if fusion.status is Status.KEPT and fusion.chain_id}
    variants: dict[str, set[str]] = {}
    for answer in report.answers:
        if isinstance(answer, Match) and answer.is_library and answer.chain_id in kept:
            variants.setdefault(answer.kernel, set()).add(answer.variant)
    patterns, sources = library_patterns(only=variants)
    fusions = tuple(recall(capture, [chain for chain in report.chains if chain.id in kept], patterns, sources))
    merge = next((row for row in report.rewrites if row.name == TITLE and row.status is Status.KEPT), None)
    return SavedPlan(
        run_dir=folder,
        capture=capture,
        report=report,
        fusions=fusions,
        passes=tuple(kept_passes(report.rewrites)),
        merge=merge,
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
    kind = torch.device(loaded.record.device).type
    if kind != saved.capture.environment.device_kind:
        raise PlanMismatch(
            run=saved.run_dir.name, detail=f"it was made on {saved.capture.environment.device_kind}, this is {kind}"
        )
    clock = clock or PhaseClock(Progress())
    with clock.phase("capture"):
        live = capture_regions(loaded.model, loaded.args, loaded.kwargs, model_id=loaded.record.model_id)
        bench = Bench(live, on_cuda=kind == "cuda")
    difference = first_difference(saved.capture.ops, bench.ops)
    if difference is not None:
        raise PlanMismatch(run=saved.run_dir.name, detail=difference)
    with clock.phase("kernels"):
        bench.observe(saved.fusions)
        backends = {fusion.chain_id: fusion.rendered[0].backend for fusion in saved.report.fusions if fusion.rendered}
        kernel_dir = saved.run_dir / "kernels"
        kernel_dir.mkdir(exist_ok=True)
        built = []
        for number, planned in enumerate(saved.fusions):
            backend = backends[planned.chain.id]
            trial = try_fusion(
                bench, planned, backend=backend, fast_math=False, kernel_dir=kernel_dir, seed=number, is_timed=False
            )
            if trial.built is None:
                raise PlanMismatch(run=saved.run_dir.name, detail=f"{planned.match.kernel}: {trial.fusion.reason}")
            built.append(trial.built)
        if saved.merge is not None:
            bench, built = _merged(bench, built, saved, saved.merge, loaded, kernel_dir, backends)
        gemvs = _gemvs(bench, saved, kernel_dir)
    with clock.phase("install"):
        variant = bench.build(built, [name for name in PASSES if name in saved.passes], gemvs)
        kept = Kept(
            fusions=tuple(built), passes=saved.passes, rows=gemm_rows(bench.ops), on_cuda=bench.on_cuda, has_gemvs=bool(gemvs)
        )
        graphs = Graphs(CudaRecorder()) if saved.has_graph and bench.on_cuda else None
        fused = FusedModel(
            loaded.model, bench.live.regions, variant.modules, loaded.args, loaded.kwargs, graphs=graphs, kept=kept, live=live
        )
        live.written.restore()
        fused.report = saved.report
        return fused.apply()


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
        with clock.phase("read the plan"):
            saved = load_plan(folder)
        fused = apply_plan(loaded, saved, clock)
        try:
            with clock.phase("first step"), torch.no_grad():
                fused(*loaded.args, **loaded.kwargs)
                bench.wait()
        finally:
            fused.revert()
    bench.live.written.restore()
    if fused.fallbacks:
        raise PlanMismatch(run="this run", detail=f"its first step ran the original ops: {next(iter(fused.fallbacks))}")
    built = [kernel.build_ns for fusion in report.fusions if fusion.status is Status.KEPT for kernel in fusion.rendered]
    return WarmUp(phases_s=tuple(clock.durations_s), build_s=round(sum(built) / 1e9, 3))


def _merged(
    bench: Bench,
    built: list[BuiltFusion],
    saved: SavedPlan,
    merge: GraphRewrite,
    loaded: LoadedWorkload,
    kernel_dir: Path,
    backends: Mapping[str, str],
) -> tuple[Bench, list[BuiltFusion]]:
    free_bytes, _ = memory_bytes(torch.device(loaded.record.device))
    regions = merge_all(bench, may_copy=merge.held_bytes > 0, free_bytes=free_bytes)
    if sum(one.merged for one in regions) != merge.sites:
        reasons = [reason for one in regions for reason in one.refusals]
        raise PlanMismatch(run=saved.run_dir.name, detail=f"GEMMs that it merged cannot be merged here: {reasons[0]}")
    try:
        backend = next(iter(backends.values()), "")
        merged = on_merged(bench, regions, built, mover(kernel_dir, backend=backend, fast_math=False))
    except CannotMove as refusal:
        raise PlanMismatch(run=saved.run_dir.name, detail=str(refusal)) from refusal
    return merged.bench, merged.built


def _gemvs(bench: Bench, saved: SavedPlan, kernel_dir: Path) -> list[BuiltGemv]:
    """Build the kernels of linears on few rows again, with the configurations that were chosen, and check their numbers."""
    if not saved.gemvs:
        return []
    kinds = find_kinds(bench)
    observe(bench, kinds)
    found: list[BuiltGemv] = []
    for kind in kinds:
        header = header_of(kind.title)
        for row in (row for row in saved.gemvs if row.kernel == kind.title):
            kernel = row.rendered[0]
            config = GemvConfig.read(kernel.tuning)
            # A kernel is named after all that is constant in it.
            if entry_of(kind.problem, header, config) != kernel.name:
                continue
            try:
                made = build(kind.problem, header, config, kernel_dir / f"{row.id}_{kind.title}", tuning=kernel.tuning)
                numerics = check(bench, kind, made, seed=len(found))
            except KernelBuildFailed as failure:
                raise PlanMismatch(run=saved.run_dir.name, detail=str(failure)) from failure
            if not numerics.is_passed:
                raise PlanMismatch(run=saved.run_dir.name, detail=f"{kind.title}: its numbers no longer pass")
            found.append(install(bench, kind, made, name=row.id))
    missing = [row.kernel for row in saved.gemvs if row.id not in {gemv.id for gemv in found}]
    if missing:
        raise PlanMismatch(run=saved.run_dir.name, detail=f"this model has no linears for {', '.join(missing)}")
    bench.values.clear()
    return found


def first_difference(before: tuple[OpNode, ...], now: list[OpNode]) -> str | None:
    """Say where two captured graphs differ, or None when they are the same ops on the same layouts.

    Where in its storage a model's own tensor begins is no part of its layout: a weight may lie beside others or alone.
    """
    for old, new in zip(before, now, strict=False):
        same = (old.target, old.args, old.kwargs, old.alias_of) == (new.target, new.args, new.kwargs, new.alias_of)
        if not same or _layouts(before, old) != _layouts(now, new):
            return f"op {new.index} is {new.target} with {new.outputs}, the plan has {old.target} with {old.outputs}"
    if len(before) != len(now):
        return f"this graph has {len(now)} ops, the plan's has {len(before)}"
    return None


def _layouts(ops: Sequence[OpNode], op: OpNode) -> list[TensorMeta]:
    owner = op if op.alias_of is None else ops[op.alias_of]
    begins = owner.outputs[0].offset if owner.outputs else 0
    return [replace(meta, offset=meta.offset - begins) for meta in op.outputs]
