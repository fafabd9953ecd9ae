"""The last stage: the kept rewrites in the live model, its numbers as a whole, and what it costs now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fusion_advisor import units
from fusion_advisor.fuse.after_side import measure_after, measure_others, profile_of, without_doubles
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.keep_rule import Decision, confirmed
from fusion_advisor.fuse.decide.session import Bench, BuiltFusion, BuiltLinear, replaced_sites, step_of
from fusion_advisor.fuse.decide.step_runner import StepRunner
from fusion_advisor.fuse.installed import LAST_STAGE, Installed, Job, KeptStep, LastStage, Measured
from fusion_advisor.fuse.live import bisect
from fusion_advisor.fuse.live.cuda_graph_choice import why_no_graph
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.saved_plan import ReusablePlan, gemm_rows
from fusion_advisor.fuse.method_notes import method_notes
from fusion_advisor.fuse.passes.cuda_graph import CUDA_GRAPH
from fusion_advisor.fuse.passes.gemm_epilogue import GEMM_EPILOGUE
from fusion_advisor.fuse.passes.linear_sites import LINEAR_KERNELS
from fusion_advisor.fuse.passes.registry import kept_ids, kept_passes, row_of
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.fuse.prediction.interval import with_intervals
from fusion_advisor.fuse.receipts import reverted, with_kernels, with_receipt
from fusion_advisor.fuse.rewrite.collective_kernels import ALL_REDUCE_NORM
from fusion_advisor.fuse.rewrite.collective_kernels import TITLES as SUM_TITLES
from fusion_advisor.fuse.rewrite.frozen_values import frozen_values
from fusion_advisor.fuse.rewrite.scan_kernels import SCAN_KERNELS, TITLE
from fusion_advisor.fuse.whole_model_gate import (
    comparable_device_ns,
    given_back,
    shortfall,
    why_nothing_stays,
    why_parts_do_not_pay,
)
from fusion_advisor.records import EAGER, OURS, Capture, ModelCheck, Report, Status, StepProfile
from fusion_advisor.runtime.torch_internals import module_call
from fusion_advisor.workload.load import LoadedWorkload

_GRAPH_S, _QUICK_GRAPH_S = 10.0, 1.0
"""On that with and without a CUDA graph. In 3 s of steps of 60 ms, eight rounds, a step that the host launches op by op differed
from itself by 11 % (H200); steps of up to some milliseconds have all their rounds sooner."""
MOST_SHAPES = 8
"""Shapes that ``dynamic="on_first_use"`` learns by itself."""


@dataclass(slots=True)
class AppliedRun:
    """A finished ``apply``: the fused model and its report."""

    fused: FusedModel
    report: Report
    capture: Capture
    parts: tuple[tuple[str, Report, Capture], ...] = ()
    """Further regimes of the same model, each with a report of its own: (folder, report, capture)."""
    write_start: Callable[..., str] | None = None
    """Writes what a start without a trace needs in addition to the capture. Returns why it cannot. None: nothing was kept."""

    def revert(self) -> None:
        """Put the original model back."""
        self.fused.revert()


def install(
    loaded: LoadedWorkload,
    capture: Capture,
    bench: Bench,
    report: Report,
    decision: Decision,
    built: list[BuiltFusion],
    options: ApplyOptions,
    progress: Progress,
    clock: PhaseClock,
    *,
    linears: Sequence[BuiltLinear] = (),
    on_report: Callable[[Report], object] = lambda _: None,
    instruments: Instruments = MEASURED,
    last: LastStage = LAST_STAGE,
) -> AppliedRun:
    """Put the kept rewrites into the live model, check the whole of it, and measure the after side.

    If the whole model's numbers do not pass, the guilty rewrites are found by bisection and dropped, and the rest is installed.
    Where they do not pass without any, or the step became slower than eager, nothing stays.

    Args:
        loaded: the model and its inputs.
        capture: what was captured of it.
        bench: the live capture.
        report: with every verdict; the after side is filled in here.
        decision: of the step's timing.
        built: the fusions that stay.
        options: run directory, dry run.
        progress: receives each result.
        clock: of the phases.
        linears: calls of linears with what is around them that stay, in place of the fusions whose ops they take in.
        on_report: given the report without the other ways to run the step, ahead of the minutes that these take.
        instruments: time the step after.
        last: checks the fused model and records its graph.
    """
    job = Job(
        loaded=loaded, capture=capture, bench=bench, options=options, progress=progress, clock=clock, on_report=on_report,
        original=module_call.original_call(loaded.model), instruments=instruments, last=last,
    )  # fmt: skip
    return _install(job, KeptStep(report=report, decision=decision, built=built, linears=tuple(linears)))


def _install(job: Job, kept: KeptStep) -> AppliedRun:
    installed = _with_graph(_installed(job, kept))
    if not installed.has_rewrites and not installed.is_graphed:
        return _unchanged(installed)
    check = checked(installed)
    if not check.is_passed:
        with job.clock.phase("find what is wrong"):
            left = _without_guilty(job, kept, check)
        if left is not None:
            if installed.fused.graphs is not None:
                installed.fused.graphs.forget()
            installed.fused.give_back()
            return _install(job, left)
    _say_so_far(installed)
    return concluded(installed, measure_after(installed, check))


def _say_so_far(installed: Installed) -> None:
    """Show what the step gains before other ways to run it are timed, which takes longer than all that came before on a CPU."""
    decision, job = installed.kept.decision, installed.job
    if job.options.is_timed and installed.has_rewrites:
        before_ns, after_ns = decision.before.median_ns, decision.after.median_ns
        times = f"{units.duration(before_ns)} → {units.duration(after_ns)} per step"
        job.progress.found(f"all together: {times}, {units.speedup(before_ns / after_ns)}")


def _installed(job: Job, kept: KeptStep) -> Installed:
    """Build the fused model."""
    bench, options, report, decision = job.bench, job.options, kept.report, kept.decision
    variant = bench.build(kept.built, kept_passes(report.rewrites), kept.linears)
    measured = replace(
        report,
        rewrites=tuple(with_kernels(row, variant) for row in report.rewrites),
        status="applied",
        noise_share=decision.noise_share if options.is_timed and options.effort != "quick" else None,
        step_before=decision.before,
        step_after=decision.after,
        frozen=frozen_values(bench.live.regions, variant.modules),
        notes=(*report.notes, *method_notes(decision, options, bench)),
    )
    scans = {row.id for row in report.fusions if row.kernel == TITLE and not row.chain_id}
    sums = {row.id for row in report.fusions if row.kernel in SUM_TITLES and not row.chain_id}
    with_linears = any(one.id not in (GEMM_EPILOGUE.id, *scans, *sums) for one in kept.linears)
    with_scans = any(one.id in scans for one in kept.linears)
    with_sums = any(one.id in sums for one in kept.linears)
    kinds = [LINEAR_KERNELS.id] * with_linears + [SCAN_KERNELS.id] * with_scans + [ALL_REDUCE_NORM.id] * with_sums
    plan = ReusablePlan(
        fusions=tuple(kept.built), rewrites=(*kept_ids(report.rewrites), *kinds),
        rows=gemm_rows(bench.ops), on_cuda=bench.on_cuda, fast_math=options.fast_math, tolerance=options.tolerance,
    )  # fmt: skip
    recorder = job.last.graph_recorder(bench) if options.graph and options.wants(CUDA_GRAPH.id) else None
    no_graph = why_no_graph(bench.live.breaks, bench.live.runs_of_regions())
    graphs = None
    if recorder is not None and no_graph is None:
        graphs = Graphs(
            recorder, limit=options.graphs, most_bytes=options.graph_bytes, outputs=options.graph_outputs, meet=job.last.meet
        )
    fused = FusedModel(
        job.loaded.model, bench.live.regions, variant.modules, job.loaded.args, job.loaded.kwargs, plan=plan, graphs=graphs,
        on_first_use=MOST_SHAPES if options.dynamic == "on_first_use" else 0, live=bench.live,
    )  # fmt: skip
    return Installed(job=job, kept=kept, variant=variant, fused=fused, report=measured, tries_graph=recorder is not None)


def _with_graph(installed: Installed) -> Installed:
    """Decide on the CUDA graph; on a CPU, or where none was asked for, nothing changes."""
    job, fused, bench, options = installed.job, installed.fused, installed.job.bench, installed.job.options
    if not installed.tries_graph:
        return installed
    if fused.graphs is None:
        no_graph = why_no_graph(bench.live.breaks, bench.live.runs_of_regions())
        row = row_of(CUDA_GRAPH, status=Status.NOT_REPLACED, reason=no_graph or "", sites=0)
    else:
        decision = installed.kept.decision
        with job.clock.phase("CUDA graph"):
            row = job.last.choose_graph(
                fused, installed.fused_call, installed.fused_call if installed.has_rewrites else job.eager_call,
                min_gain=options.min_gain, confidence=options.confidence, rounds=4 * options.runs,
                budget_s=_QUICK_GRAPH_S if options.effort == "quick" else _GRAPH_S,
                least_s=options.min_time_s, wait=bench.wait, on_cuda=bench.on_cuda, rewind=bench.live.written.rewind,
                device_ns=decision.after.median_ns if decision.method == "cuda_graph" else None, is_timed=options.is_timed,
                rest=bench.rest if decision.method == "cuda_graph" else None,
            )  # fmt: skip
    job.progress.note(f"{row.name}: {row.status}, {row.reason}")
    report = with_intervals(replace(installed.report, rewrites=(*installed.report.rewrites, row)))
    return replace(installed, report=report, is_graphed=row.status is Status.KEPT)


def _unchanged(installed: Installed) -> AppliedRun:
    """Leave the model as it was: the captured graph alone is no gain, for it builds masks that eager skips."""
    report, before, rows = installed.report, installed.report.before, measure_others(installed)
    if rows:
        report, before = replace(report, baselines=without_doubles(rows)), profile_of(rows, EAGER, "eager")
    after = replace(before, label="unchanged")
    report = replace(report, before=before, after=after, durations_s=tuple(installed.job.clock.durations_s))
    installed.fused.report = report
    return AppliedRun(fused=installed.fused, report=report, capture=installed.job.capture)


def checked(installed: Installed) -> ModelCheck:
    """Compare the whole model's numbers with a more precise run of the original.

    Args:
        installed: the fused model.
    """
    job = installed.job
    with job.clock.phase("check the model"):
        with torch.no_grad():
            check = job.last.check_model(
                job.loaded, job.eager_call, installed.fused_call, job.bench.live.written, tolerance=job.options.tolerance
            )
        job.progress.note(f"error {check.fused_rel_l2:.1e} against {check.oracle}, eager {check.eager_rel_l2:.1e}")
    return check


def _without_guilty(job: Job, kept: KeptStep, check: ModelCheck) -> KeptStep | None:
    """Return what is left without the rewrites that make the whole model wrong; None where there is none to blame."""
    bench = job.bench
    suspects = bisect.suspects_of(kept.report, kept.built, kept.linears)
    guilty = bisect.guilty_in(
        job.loaded, bench, suspects, job.eager_call, tolerance=job.options.tolerance, check_model=job.last.check_part
    )
    if not guilty:
        return None
    names = {one.id for one in guilty}
    job.progress.warn(f"right alone, wrong in the whole model: {', '.join(sorted(names))}")
    left = [one for one in kept.built if one.planned.id not in names]
    linears = tuple(one for one in kept.linears if one.id not in names)
    placed = tuple(replaced_sites(bench.build(left, (), linears)))
    dropped = bisect.without(kept.report, guilty, placed, why=shortfall(check))
    step, original = step_of(bench, left, kept_passes(dropped.rewrites), linears), step_of(bench, (), ())
    budget_s = job.options.budgets.wall_s if job.options.is_timed else 0.0
    timed = confirmed(StepRunner(bench), kept.decision, original.run, step.run, budget_s=budget_s)
    return KeptStep(report=dropped, decision=timed, built=left, linears=linears)


def concluded(installed: Installed, measured: Measured) -> AppliedRun:
    """Put the model in place, or revert everything, and complete the report.

    Args:
        installed: the fused model.
        measured: its after side.
    """
    job, fused, report = installed.job, installed.fused, installed.report
    before, after = (profile_of(measured.baselines, name, label) for name, label in ((EAGER, "eager"), (OURS, "fused")))
    refusal, status = _refusal(installed, measured, before, after)
    runs = job.bench.live.runs_of_regions()
    fallbacks = [f"the fused model ran its original ops: {reason}" for reason in fused.fallbacks]
    decision = installed.kept.decision
    captured = report.captured
    final = replace(
        report,
        before=before,
        captured=None if captured is None else replace(captured, device=decision.before if job.bench.on_cuda else None),
        after=after,
        baselines=without_doubles(measured.baselines),
        warm_up=measured.warm_up,
        call_overhead=measured.overhead,
        answer_s=measured.answer_s,
        fusions=tuple(with_receipt(fusion, installed.variant, measured.after_step, runs) for fusion in report.fusions),
        model_check=measured.check,
        durations_s=tuple(job.clock.durations_s),
        warnings=(*report.warnings, *measured.warnings, *fallbacks),
    )
    if refusal is not None:
        job.progress.warn(refusal)
        final = reverted(final, refusal, status)
    if refusal is None and not job.options.dry_run:
        fused.apply()
    else:
        if fused.graphs is not None:
            fused.graphs.forget()
        fused.forget()
    fused.report = final
    return AppliedRun(fused=fused, report=final, capture=job.capture)


def _refusal(installed: Installed, measured: Measured, before: StepProfile, after: StepProfile) -> tuple[str | None, Status]:
    """Say why nothing may stay in the model, or None where it may, and the verdict that it is on each rewrite."""
    options, bench = installed.job.options, installed.job.bench
    assert before.wall is not None and after.wall is not None
    device_ns = comparable_device_ns(before, after)
    before_ns, after_ns = device_ns or (0, 0)
    refusal = why_nothing_stays(
        measured.check,
        before_ns,
        after_ns,
        before.wall,
        after.wall,
        is_device_judged=bench.on_cuda and not installed.is_graphed and device_ns is not None,
        is_time_judged=options.is_timed,
        captured=None if measured.check.is_passed else _check_of_capture(installed),
    )
    if refusal is None and options.is_timed and not bench.live.is_whole():
        return why_parts_do_not_pay(installed.kept.decision, before.wall, after.wall, options.confidence), Status.WITHIN_NOISE
    return refusal, given_back(measured.check)


def _check_of_capture(installed: Installed) -> ModelCheck:
    """Compare what the captured graphs gave, with the model's own ops in them, with the model's numbers."""
    job = installed.job
    with torch.no_grad():
        return job.last.check_model(
            job.loaded, job.eager_call, lambda: job.bench.live.output, job.bench.live.written, tolerance=job.options.tolerance
        )
