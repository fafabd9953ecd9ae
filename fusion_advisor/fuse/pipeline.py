"""The loop, stage by stage: profile, plan, try each fusion, keep what pays, install, check the whole model, report.

Every stage takes records and returns records; the live tensors stay in :class:`Bench`. After each fusion the report so far is
handed to ``options.on_report`` (the CLI writes it to disk), so an interrupted run loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.capture import torch_internals
from fusion_advisor.capture.attribute import Step
from fusion_advisor.capture.graph import LiveCapture
from fusion_advisor.capture.profile import profile_model
from fusion_advisor.environment import describe_environment, measure_bandwidth
from fusion_advisor.fuse import steps
from fusion_advisor.fuse.bench import PASSES, Bench, BuiltFusion, Variant, replaced_sites
from fusion_advisor.fuse.decide import Candidate, Decision, decide
from fusion_advisor.fuse.model import FusedModel
from fusion_advisor.fuse.model_check import check_whole_model
from fusion_advisor.fuse.options import ApplyOptions, ProfileOptions
from fusion_advisor.fuse.plan import Plan, make_plan
from fusion_advisor.fuse.trial import try_fusion
from fusion_advisor.library.patterns import library_patterns
from fusion_advisor.records import Capture, Fusion, GraphRewrite, Report, Status
from fusion_advisor.workload.device import is_out_of_memory, out_of_memory
from fusion_advisor.workload.load import LoadedWorkload

_DECIDE_S = {"cuda": 8.0, "cpu": 30.0}
_WALL_S = 3.0


class Progress:
    """Told how a run goes; shows nothing itself. The command line passes an object of its own with these methods."""

    def phase(self, name: str) -> None:
        """A phase begins."""

    def note(self, text: str) -> None:
        """What the phase found."""

    def step(self, done: int, total: int, text: str) -> None:
        """How far the phase has come."""

    def warn(self, text: str) -> None:
        """Something the user should know, though the run goes on."""


@dataclass(slots=True)
class AppliedRun:
    """A finished ``apply``: the fused model and its report."""

    fused: FusedModel
    report: Report
    capture: Capture

    def revert(self) -> None:
        """Put the original model back."""
        self.fused.revert()


class _Clock:
    """Seconds per phase, for the report."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.durations_s: list[tuple[str, float]] = []

    @contextmanager
    def phase(self, name: str) -> Any:
        self._progress.phase(name)
        started = time.perf_counter()
        yield
        self.durations_s.append((name, round(time.perf_counter() - started, 3)))


def profile_workload(loaded: LoadedWorkload, options: ProfileOptions, progress: Progress | None = None) -> tuple[Report, Capture]:
    """Profile a loaded workload: measure, capture, rank, match; nothing is changed.

    Raises:
        CannotCapture: dynamo captured nothing.
        OutOfMemory: with what to try instead.
    """
    progress = progress or Progress()
    clock = _Clock(progress)
    with _memory_errors(loaded, "profiling"):
        capture, _, plan = _profile(loaded, options, progress, clock)
    return _report(capture, plan, options, clock, status="profiled"), capture


def apply_workload(
    loaded: LoadedWorkload,
    options: ApplyOptions,
    progress: Progress | None = None,
    on_report: Callable[[Report], None] = lambda _: None,
) -> AppliedRun:
    """Profile, try every fusion, keep what pays, and leave the model fused.

    Args:
        loaded: the model and its inputs.
        options: how to measure and decide.
        progress: told what goes on.
        on_report: given the report so far after every fusion.

    Raises:
        CannotCapture: dynamo captured nothing.
        OutOfMemory: with what to try instead.
    """
    progress = progress or Progress()
    clock = _Clock(progress)
    with _memory_errors(loaded, "applying"):
        capture, live, plan = _profile(loaded, options, progress, clock)
        report = _report(capture, plan, options, clock, status="interrupted")
        on_report(report)
        bench = Bench(live, on_cuda=capture.environment.device_kind == "cuda")
        with clock.phase("fusions"):
            fusions, built = _try_all(
                bench, plan, options, progress, lambda done: on_report(replace(report, fusions=tuple(done)))
            )
        with clock.phase("keep what pays"):
            decision, rewrites, fusions, built = _decide(bench, fusions, built, options, progress)
        report = replace(report, fusions=tuple(fusions), rewrites=rewrites)
        on_report(report)
        return _install(loaded, capture, bench, report, decision, built, options, progress, clock)


def _profile(
    loaded: LoadedWorkload, options: ProfileOptions, progress: Progress, clock: _Clock
) -> tuple[Capture, LiveCapture, Plan]:
    device = loaded.record.device
    with clock.phase("bandwidth"):
        environment = describe_environment(device)
        bandwidth = measure_bandwidth(device)
        progress.note(f"copy {bandwidth.copy_bytes_per_s / 1e9:.0f} GB/s, smallest kernel {bandwidth.launch_ns / 1e3:.2f} µs")
    with clock.phase("profile"):
        trace_to = options.run_dir / "trace.before.json.gz" if options.run_dir else None
        capture, live = profile_model(
            loaded.model,
            loaded.args,
            loaded.kwargs,
            workload=loaded.record,
            environment=environment,
            bandwidth=bandwidth,
            warmup=options.warmup,
            runs=options.runs,
            budget_s=_WALL_S,
            with_nvtx=options.nvtx,
            trace_to=trace_to,
            note=progress.note,
        )
    for warning in capture.quality.warnings:
        progress.warn(warning)
    with clock.phase("chains"):
        patterns, sources = library_patterns(options.kernel_dirs)
        plan = make_plan(
            capture,
            patterns,
            min_share=options.min_share,
            top=options.top,
            only=options.only,
            skip=options.skip,
            sources=sources,
        )
        share = sum(chain.share for chain in plan.chains)
        progress.note(f"{len(plan.chains)} chains hold {share:.1%} of device time, {len(plan.fusions)} to try")
    return capture, live, plan


def _try_all(
    bench: Bench, plan: Plan, options: ApplyOptions, progress: Progress, so_far: Callable[[list[Fusion]], None]
) -> tuple[list[Fusion], list[BuiltFusion]]:
    backend = options.backend or ("triton" if bench.on_cuda else "cpp")
    kernel_dir = (options.run_dir or Path.cwd() / "fusion-runs" / "unnamed") / "kernels"
    kernel_dir.mkdir(parents=True, exist_ok=True)
    bench.observe(plan.fusions)
    fusions: list[Fusion] = []
    built: list[BuiltFusion] = []
    for number, planned in enumerate(plan.fusions):
        progress.step(number, len(plan.fusions), f"{planned.id} {planned.match.kernel}: build, check, time")
        trial = try_fusion(
            bench, planned, backend=backend, fast_math=options.fast_math, kernel_dir=kernel_dir, seed=number, log=progress.note
        )
        if trial.fusion.status in (Status.BUILD_FAILED, Status.WRONG_NUMBERS):
            progress.warn(f"{trial.fusion.id} {trial.fusion.kernel}: {trial.fusion.reason}")
        fusions.append(trial.fusion)
        if trial.built is not None:
            built.append(trial.built)
        so_far(fusions)
    return fusions, built


def _decide(
    bench: Bench, fusions: list[Fusion], built: list[BuiltFusion], options: ApplyOptions, progress: Progress
) -> tuple[Decision, tuple[GraphRewrite, ...], list[Fusion], list[BuiltFusion]]:
    changed = bench.build((), tuple(PASSES)).changed
    passes = [Candidate(id=f"R{number}", graph_pass=name) for number, name in enumerate(PASSES, start=1) if changed[name]]
    by_gain = sorted(built, key=lambda item: -_predicted(fusions, item))
    candidates = [*passes, *(Candidate(id=item.planned.id, fusion=item) for item in by_gain)]
    budget = _DECIDE_S["cuda" if bench.on_cuda else "cpu"]
    decision = decide(
        bench, candidates, min_gain=options.min_gain, confidence=options.confidence, budget_s=budget, note=progress.note
    )
    rewrites = []
    for candidate in passes:
        verdict = decision.verdicts[candidate.id]
        rewrites.append(
            GraphRewrite(
                id=candidate.id,
                name=PASSES[candidate.graph_pass][0],
                status=verdict.status,
                reason=verdict.reason,
                sites=changed[candidate.graph_pass],
                step_delta_ns=verdict.delta_ns,
                step_delta_ci_ns=verdict.interval_ns,
            )
        )
    judged = []
    for fusion in fusions:
        timed = decision.verdicts.get(fusion.id)
        if timed is None:
            judged.append(fusion)
            continue
        judged.append(
            replace(
                fusion,
                status=timed.status,
                reason=timed.reason,
                step_delta_ns=timed.delta_ns,
                step_delta_ci_ns=timed.interval_ns,
            )
        )
    kept = {fusion.id for fusion in judged if fusion.status is Status.KEPT}
    return decision, tuple(rewrites), judged, [item for item in by_gain if item.planned.id in kept]


def _predicted(fusions: Sequence[Fusion], item: BuiltFusion) -> int:
    return next(fusion.predicted_saving_ns for fusion in fusions if fusion.id == item.planned.id)


def _install(
    loaded: LoadedWorkload,
    capture: Capture,
    bench: Bench,
    report: Report,
    decision: Decision,
    built: list[BuiltFusion],
    options: ApplyOptions,
    progress: Progress,
    clock: _Clock,
) -> AppliedRun:
    passes = [name for name, rewrite in _kept_passes(report).items() if rewrite.status is Status.KEPT]
    variant = bench.build(built, passes)
    measured = replace(
        report,
        status="applied",
        noise_share=decision.noise_share,
        step_before=decision.before,
        step_after=decision.after,
        notes=(*report.notes, *_method_notes(decision, options, bench)),
    )
    original = torch_internals.original_call(loaded.model)
    fused = FusedModel(loaded.model, bench.live.regions, variant.modules, loaded.args, loaded.kwargs)

    def eager_call() -> Any:
        return original(*loaded.args, **loaded.kwargs)

    def fused_call() -> Any:
        return fused.dispatch(*loaded.args, **loaded.kwargs)

    if not built and not passes:
        # The captured graph alone is no gain (it builds masks that eager skips): the model stays exactly as it was.
        unchanged = replace(measured, after=replace(report.before, label="unchanged"), durations_s=tuple(clock.durations_s))
        fused.report = unchanged
        return AppliedRun(fused=fused, report=unchanged, capture=capture)
    with clock.phase("check the model"):
        with torch.no_grad():
            check = check_whole_model(loaded, eager_call, fused_call)
        progress.note(f"error {check.fused_rel_l2:.1e} against {check.oracle}, eager {check.eager_rel_l2:.1e}")
    with clock.phase("measure after"):
        wall_before, wall_after = steps.wall_pair(
            eager_call, fused_call, on_cuda=bench.on_cuda, runs=options.runs, budget_s=_WALL_S
        )
        trace_to = options.run_dir / "trace.after.json.gz" if options.run_dir else None
        after_step = steps.trace_fused(bench, variant, fused_call, trace_to)
        before = replace(
            report.before, wall=wall_before, peak_memory_bytes=steps.peak_memory_bytes(eager_call, on_cuda=bench.on_cuda)
        )
        after = steps.step_profile(
            "fused",
            after_step.launches,
            wall=wall_after,
            device=decision.after if decision.method == "cuda_graph" else None,
            peak_memory_bytes=steps.peak_memory_bytes(fused_call, on_cuda=bench.on_cuda),
        )
    receipts = [_with_receipt(fusion, built, variant, after_step) for fusion in report.fusions]
    refusal = _why_nothing_stays(
        check.is_passed, before.device_ns, after.device_ns, wall_before, wall_after, on_cuda=bench.on_cuda
    )
    warnings = list(report.warnings)
    if fused.fallbacks:
        warnings += [f"the fused model ran its original ops: {reason}" for reason in fused.fallbacks]
    if refusal is not None:
        progress.warn(refusal)
        warnings.append(refusal)
        receipts = [_reverted(fusion, refusal) for fusion in receipts]
        report = replace(report, rewrites=tuple(_reverted_rewrite(rewrite, refusal) for rewrite in report.rewrites))
    elif not options.dry_run:
        fused.apply()
    captured = None if report.captured is None else replace(report.captured, device=decision.before if bench.on_cuda else None)
    final = replace(
        measured,
        rewrites=report.rewrites,
        before=before,
        captured=captured,
        after=after,
        fusions=tuple(receipts),
        model_check=check,
        durations_s=tuple(clock.durations_s),
        warnings=tuple(warnings),
    )
    fused.report = final
    return AppliedRun(fused=fused, report=final, capture=capture)


def _kept_passes(report: Report) -> dict[str, GraphRewrite]:
    by_title = {title: name for name, (title, _) in PASSES.items()}
    return {by_title[rewrite.name]: rewrite for rewrite in report.rewrites}


def _with_receipt(fusion: Fusion, built: Sequence[BuiltFusion], variant: Variant, after_step: Step) -> Fusion:
    """Fill in what the live model and the after-trace say; fusions that differ only in sizes share a kernel and its launches."""
    replaced = replaced_sites(variant)
    if fusion.id not in replaced:
        return fusion
    name = next(item.kernel.name for item in built if item.planned.id == fusion.id)
    sharing = sum(replaced.get(item.planned.id, 0) for item in built if item.kernel.name == name)
    seen = steps.launches_of(after_step, name)
    refusals = fusion.receipt.refusals
    if seen != sharing:
        refusals = (*refusals, f"{name} was launched {seen} times where {sharing} sites call it")
    launches = replaced[fusion.id] if seen == sharing else min(seen, replaced[fusion.id])
    receipt = replace(fusion.receipt, sites_replaced=replaced[fusion.id], launches_after=launches, refusals=refusals)
    return replace(fusion, receipt=receipt)


def _why_nothing_stays(
    is_passed: bool, before_ns: int, after_ns: int, wall_before: Any, wall_after: Any, *, on_cuda: bool
) -> str | None:
    """The whole-model gate: device time never rises (on a CPU: the step), and numbers pass; else everything is reverted."""
    if not is_passed:
        return "the whole model's numbers do not pass: everything was reverted"
    if on_cuda and after_ns > before_ns:
        return (
            f"device time would rise from {before_ns / 1e6:.3f} to {after_ns / 1e6:.3f} ms against eager: everything was reverted"
        )
    if not on_cuda and wall_after.ci_low_ns > wall_before.ci_high_ns:
        rise = f"from {wall_before.median_ns / 1e6:.2f} to {wall_after.median_ns / 1e6:.2f} ms"
        return f"the step would rise {rise}: everything was reverted"
    return None


def _reverted(fusion: Fusion, reason: str) -> Fusion:
    if fusion.status is not Status.KEPT:
        return fusion
    receipt = replace(fusion.receipt, sites_replaced=0)
    return replace(fusion, status=Status.NOT_REPLACED, reason=reason, receipt=receipt)


def _reverted_rewrite(rewrite: GraphRewrite, reason: str) -> GraphRewrite:
    return rewrite if rewrite.status is not Status.KEPT else replace(rewrite, status=Status.NOT_REPLACED, reason=reason)


def _report(capture: Capture, plan: Plan, options: ProfileOptions, clock: _Clock, *, status: str) -> Report:
    on_cuda = capture.environment.device_kind == "cuda"
    notes = (
        "Shares come from a traced run, every wall time from runs without a profiler.",
        "Device time is the sum of raw kernel events of one step (the median of three)."
        if on_cuda
        else "On a CPU a launch is one ATen op call that computes, and device time the sum of their durations.",
        "The byte floor uses the copy bandwidth measured in this run; savings before a run are upper bounds and do not add up.",
    )
    return Report(
        run_id=options.run_id,
        config_hash=options.config_hash,
        status=status,
        command=options.command,
        workload=capture.workload,
        environment=capture.environment,
        quality=capture.quality,
        bandwidth=capture.bandwidth,
        before=steps.step_profile("eager", capture.eager_launches, wall=capture.eager_step),
        captured=steps.step_profile("captured", capture.launches),
        after=None,
        chains=plan.chains,
        answers=plan.answers,
        durations_s=tuple(clock.durations_s),
        notes=notes,
    )


def _method_notes(decision: Decision, options: ApplyOptions, bench: Bench) -> tuple[str, ...]:
    how = {
        "cuda_graph": "replays of a CUDA graph of the captured step",
        "cuda_events": "CUDA events around the captured step (it could not be recorded into a CUDA graph)",
        "wall": "wall time of the captured step",
    }[decision.method]
    rounds = len(decision.before.times_ns)
    return (
        f"Each rewrite was timed on top of the ones before it, interleaved: {how}; {rounds} rounds in the confirmation.",
        f"A rewrite is kept when its whole {options.confidence:.0%} interval saves more than {options.min_gain:.1%} of the step "
        f"and more than the A/A noise ({decision.noise_share:.2%}).",
        f"{len(bench.live.regions)} captured graph(s).",
    )


@contextmanager
def _memory_errors(loaded: LoadedWorkload, stage: str) -> Any:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            device = torch.device(loaded.record.device)
            raise out_of_memory(stage=stage, device=device, request=loaded.request, error=error) from error
        raise
