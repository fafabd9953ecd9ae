"""The loop, stage by stage: profile, plan, try each fusion, keep what pays, install, check the whole model, report.

Every stage takes records and returns records; the live tensors stay in :class:`Bench`. After each fusion the report so far is
handed to ``options.on_report`` (the CLI writes it to disk), so an interrupted run loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch

from fusion_advisor.autotune.build_ahead import BuildAhead
from fusion_advisor.autotune.start_compilers import building_ahead
from fusion_advisor.capture.graph.side_effects import Written, kept_as_it_is
from fusion_advisor.capture.graph.tracer import LiveCapture
from fusion_advisor.capture.profile import profile_model
from fusion_advisor.capture.unchanged_step import KNOWN_TO, Measurement
from fusion_advisor.chains.launch_bound import judge_launches
from fusion_advisor.codegen.registry import refuse_unready
from fusion_advisor.errors import NoTensorOutput
from fusion_advisor.fuse.advice import evaluated_masks, find_findings, torch_settings
from fusion_advisor.fuse.apply_again import apply_again, memory_of
from fusion_advisor.fuse.apply_shapes import check_ranges, with_shapes
from fusion_advisor.fuse.decide import step_profile
from fusion_advisor.fuse.decide.choose import choose
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.predict import launch_cost_ns, price_fusions
from fusion_advisor.fuse.decide.rebind import Kept, confirmed_once
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.decide.try_fusions import kernel_dir_of, try_all
from fusion_advisor.fuse.finish import AppliedRun, install
from fusion_advisor.fuse.installed import LAST_STAGE, LastStage
from fusion_advisor.fuse.layouts.fused_trial import second_look
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.model_check import named_tensors
from fusion_advisor.fuse.live.module_guard import refuse_in_vain
from fusion_advisor.fuse.method_notes import which_step, written_notes
from fusion_advisor.fuse.passes.in_trace import LAYOUTS
from fusion_advisor.fuse.passes.registry import REWRITES
from fusion_advisor.fuse.plan.options import ApplyOptions, ProfileOptions
from fusion_advisor.fuse.plan.plan import Plan, make_plan
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.fuse.prediction.interval import with_intervals
from fusion_advisor.fuse.stages.jobs_of_later import jobs_of_later
from fusion_advisor.fuse.stages.linear_kernels import LinearKernels, linear_kernels
from fusion_advisor.fuse.stages.try_on_top import Trial, try_on_top
from fusion_advisor.fuse.start.record import write_start
from fusion_advisor.fuse.too_busy import with_noise_judged
from fusion_advisor.library.patterns import library_on_demand
from fusion_advisor.records import Capture, Environment, Finding, Report
from fusion_advisor.runtime.environment import describe_environment, measure_bandwidth
from fusion_advisor.timing.machine_load import machine_load
from fusion_advisor.workload.device import current_device, first_fault, is_out_of_memory, out_of_memory
from fusion_advisor.workload.load import LoadedWorkload


def profile_workload(
    loaded: LoadedWorkload, options: ProfileOptions, progress: Progress | None = None, *, instruments: Instruments = MEASURED
) -> tuple[Report, Capture]:
    """Profile a loaded workload: measure, capture, rank, match; nothing is changed.

    Raises:
        CannotCapture: dynamo captured nothing.
        OutOfMemory: with what to try instead.
    """
    progress = progress or Progress()
    clock = PhaseClock(progress, is_whole=True)
    with on_device(loaded, "profiling"), kept_as_it_is(loaded.model, loaded.args, loaded.kwargs):
        capture, live, plan = _profile(loaded, options, progress, clock, instruments=instruments)
        findings = find_findings(capture, plan, torch_settings(), evaluated_masks(live))
        live.written.restore()
    return _report(capture, plan, findings, options, clock, live.written, status="profiled"), capture


def apply_workload(
    loaded: LoadedWorkload,
    options: ApplyOptions,
    progress: Progress | None = None,
    on_report: Callable[[Report], None] = lambda _: None,
    *,
    instruments: Instruments = MEASURED,
    linear_kernels: Callable[..., LinearKernels | None] = linear_kernels,
    last: LastStage = LAST_STAGE,
    started: BuildAhead | None = None,
) -> AppliedRun:
    """Profile, try every fusion, keep what pays, and leave the model fused.

    Args:
        loaded: the model and its inputs.
        options: how to measure and decide.
        progress: is given each phase and its results.
        on_report: given the report so far after every fusion.
        instruments: measure, and decide what stays.
        linear_kernels: says where kernels of linears come from.
        last: checks the fused model and records its graph.
        started: processes that compile kernels for a GPU and were started earlier; they are ended when no more are wanted.

    Raises:
        NoTensorOutput: no number shows whether a fused call is right.
        ModelInTraining: in which every call would run the original ops.
        AutocastAround: the same.
        NoCompiler: on a CPU, where every kernel is C++.
        CannotCapture: dynamo captured nothing.
        OutOfMemory: with what to try instead.
        KernelFaulted: a kernel faulted on a GPU; ``on_report`` has a report that names it by then.
    """
    _refuse_unready(loaded, options)
    calls = None if options.shapes is None else check_ranges(loaded, options)
    instruments = instruments.with_effort(options.effort)
    progress = progress or Progress()
    clock = PhaseClock(progress, is_whole=True)
    memory = memory_of(loaded, options)
    if memory is not None:
        with on_device(loaded, "applying"):
            again = apply_again(loaded, memory, options, progress, clock, on_report, instruments=instruments, last=last)
        if again is not None:
            return again if calls is None else with_shapes(again, loaded, options, calls, progress, clock, on_report, instruments)
    run = _apply(
        loaded, options, progress, clock, on_report, instruments=instruments, linear_kernels=linear_kernels, last=last,
        environment=None if memory is None else memory.environment, started=started,
    )  # fmt: skip
    if memory is not None:
        memory.keep(run)
    return run if calls is None else with_shapes(run, loaded, options, calls, progress, clock, on_report, instruments)


def _apply(
    loaded: LoadedWorkload,
    options: ApplyOptions,
    progress: Progress,
    clock: PhaseClock,
    on_report: Callable[[Report], None],
    *,
    instruments: Instruments,
    linear_kernels: Callable[..., LinearKernels | None],
    last: LastStage,
    environment: Environment | None,
    started: BuildAhead | None,
) -> AppliedRun:
    """Profile and decide, with nothing remembered."""
    with (
        on_device(loaded, "applying"), kept_as_it_is(loaded.model, loaded.args, loaded.kwargs), ExitStack() as at_the_end,
        ExitStack() as builds,
    ):  # fmt: skip
        ahead = builds.enter_context(building_ahead(loaded.record.device, progress.warn, started))
        capture, live, plan = _profile(
            loaded, options, progress, clock, is_timed=options.is_timed, instruments=instruments,
            environment=environment, ahead=ahead,
        )  # fmt: skip
        at_the_end.callback(live.written.restore)
        _refuse_without_output(loaded, live)
        report = _first_report(capture, live, plan, options, clock)
        on_report(report)
        bench = Bench(
            live, on_cuda=capture.environment.device_kind == "cuda", timer=instruments.timer, rest=instruments.rest,
            record=instruments.record,
        )  # fmt: skip
        with clock.phase("fusions"):
            fusions, built = try_all(
                bench, plan, options, progress, lambda done: on_report(replace(report, fusions=tuple(done))), instruments, ahead,
                lambda: jobs_of_later(bench, plan.fusions, options, bench.device),
            )  # fmt: skip
            if bench.recorder is None:  # compilers would take cores from a step that the host launches
                builds.close()
        if options.dry_run:
            return _dry_run(loaded, capture, bench, replace(report, fusions=tuple(fusions)), clock)
        with clock.phase("keep what pays"):
            budget_s = options.decide_s(capture.environment.device_kind)
            decision, rewrites, fusions, built = choose(
                bench, fusions, built, options, progress, budget_s=budget_s, instruments=instruments, capture=capture
            )
            kept = Kept(bench=bench, captured=bench, decision=decision, rewrites=rewrites, fusions=fusions, built=built)
            kept = _on_top(kept, loaded, options, progress, instruments, linear_kernels, budget_s=budget_s)
            builds.close()
            confirm_s = budget_s / 3 if options.effort != "quick" else 1.0
            kept = confirmed_once(kept, is_timed=options.is_timed, budget_s=confirm_s)
        for one in (bench, kept.bench):
            one.forget_passes()
        report = _with_decision(report, kept, plan, capture, is_timed=options.is_timed)
        on_report(report)
        run = install(
            loaded, capture, kept.bench, report, kept.decision, kept.built, options, progress, clock,
            linears=kept.linears, on_report=on_report, instruments=instruments, last=last,
        )  # fmt: skip
        return replace(run, write_start=partial(write_start, loaded, live))


def _refuse_unready(loaded: LoadedWorkload, options: ApplyOptions) -> None:
    """Refuse, ahead of any work, a model or a machine on which nothing could be kept."""
    refuse_in_vain(loaded.model, loaded.record.model_id)
    refuse_unready(options.backend, torch.device(loaded.record.device).type)


def _refuse_without_output(loaded: LoadedWorkload, live: LiveCapture) -> None:
    """Refuse a step of which no number can be checked."""
    if not named_tensors(live.output) and not live.written.tensors and not live.written.made:
        raise NoTensorOutput(model_id=loaded.record.model_id)


def _first_report(capture: Capture, live: LiveCapture, plan: Plan, options: ApplyOptions, clock: PhaseClock) -> Report:
    """Return the report of an apply that has tried nothing yet: what an interrupted run leaves."""
    findings = find_findings(capture, plan, torch_settings(), evaluated_masks(live))
    report = _report(capture, plan, findings, options, clock, live.written, status="interrupted")
    return replace(
        report, tolerance=options.tolerance, baseline=options.baseline, keep=options.keep, effort=options.effort,
        is_exact=options.exact,
    )  # fmt: skip


def _with_decision(report: Report, kept: Kept, plan: Plan, capture: Capture, *, is_timed: bool) -> Report:
    """Add what was kept, with the saving that each rewrite was expected to have and its interval.

    Args:
        report: of the plan.
        kept: what stays.
        plan: whose chains are priced.
        capture: of the captured step.
        is_timed: judge too whether the machine was quiet enough to decide.
    """
    decision = kept.decision
    cost_ns = launch_cost_ns(capture.launches, decision.untouched_ns, kept.rewrites, most_ns=capture.bandwidth.launch_ns)
    report = replace(
        report,
        fusions=tuple(price_fusions(kept.fusions, plan.chains, cost_ns)),
        rewrites=kept.rewrites,
        launch_cost_ns=cost_ns,
    )
    report = with_intervals(report)
    if not is_timed:
        return report
    return with_noise_judged(report, noise_share=decision.noise_share, step_ns=decision.untouched_ns, load=machine_load)


def _dry_run(loaded: LoadedWorkload, capture: Capture, bench: Bench, report: Report, clock: PhaseClock) -> AppliedRun:
    """End a run whose kernels were rendered, built and checked: the step is not timed, and the model is as it was."""
    original = bench.build((), ())
    fused = FusedModel(loaded.model, bench.live.regions, original.modules, loaded.args, loaded.kwargs, live=bench.live)
    fused.report = replace(report, status="dry run", durations_s=tuple(clock.durations_s))
    return AppliedRun(fused=fused, report=fused.report, capture=capture)


def _on_top(
    kept: Kept,
    loaded: LoadedWorkload,
    options: ApplyOptions,
    progress: Progress,
    instruments: Instruments,
    linear_kernels: Callable[..., LinearKernels | None],
    *,
    budget_s: float,
) -> Kept:
    device = torch.device(loaded.record.device)
    free_bytes, _ = instruments.memory_bytes(device)
    with kernel_dir_of(options) as kernel_dir:
        trial = Trial(
            options=options, kernel_dir=kernel_dir, progress=progress, device=device, budget_s=budget_s, free_bytes=free_bytes,
            instruments=instruments, linear_kernels=linear_kernels,
        )  # fmt: skip
        return try_on_top(kept, trial)


def measurement_of(options: ProfileOptions) -> Measurement:
    """Return how the unchanged step is timed and traced."""
    return Measurement(
        known_to=KNOWN_TO if isinstance(options, ApplyOptions) and options.effort != "thorough" else 0.0,
        warmup=options.warmup,
        runs=options.runs,
        budget_s=options.budgets.wall_s,
        least_s=options.min_time_s,
        traced_steps=options.steps,
        with_nvtx=options.nvtx,
        trace_to=options.run_dir / "trace.before.json.gz" if options.run_dir else None,
        layouts=() if options.exact else tuple(name for name in LAYOUTS if options.wants(name)),  # other kernels, other bits
    )


def _profile(
    loaded: LoadedWorkload,
    options: ProfileOptions,
    progress: Progress,
    clock: PhaseClock,
    *,
    is_timed: bool = True,
    instruments: Instruments = MEASURED,
    environment: Environment | None = None,
    ahead: BuildAhead | None = None,
) -> tuple[Capture, LiveCapture, Plan]:
    device = loaded.record.device
    with clock.phase("bandwidth"):
        environment = environment or describe_environment(device)
        bandwidth = options.bandwidth or measure_bandwidth(device)
        progress.note(f"copy {bandwidth.copy_bytes_per_s / 1e9:.0f} GB/s, smallest kernel {bandwidth.launch_ns / 1e3:.2f} µs")
    looks_again = second_look(
        options, bandwidth, torch.device(device), instruments.timer, progress.note, ahead, is_timed=is_timed,
        instruments=instruments,
    )  # fmt: skip
    with clock.phase("profile"):
        capture, live = profile_model(
            loaded.model,
            loaded.args,
            loaded.kwargs,
            workload=loaded.record,
            environment=environment,
            bandwidth=bandwidth,
            how=measurement_of(options),
            note=progress.note,
            timer=instruments.timer,
            second_look=looks_again,
        )
        capture = instruments.settled_capture(capture)
    for warning in capture.quality.warnings:
        progress.warn(warning)
    with clock.phase("chains"):
        patterns, sources = library_on_demand(options.kernel_dirs)
        plan = make_plan(
            capture,
            patterns,
            min_share=options.min_share,
            top=options.top,
            only=options.only_kernels,
            skip=options.skipped_kernels,
            sources=sources,
            is_exact=options.exact,
            is_timed=is_timed,
        )
        for pattern in plan.unused:
            progress.warn(f"`{pattern}` of --only or --skip fits the name of no kernel that was found for a chain")
        for pattern in options.unused_patterns(rewrite.id for rewrite in REWRITES):
            progress.warn(f"`{pattern}` of --only or --skip fits the id of no rewrite")
        share = sum(chain.share for chain in plan.chains)
        progress.note(f"{len(plan.chains)} chains hold {share:.1%} of device time, {len(plan.fusions)} to try")
    return capture, live, plan


def _report(
    capture: Capture,
    plan: Plan,
    findings: tuple[Finding, ...],
    options: ProfileOptions,
    clock: PhaseClock,
    written: Written,
    *,
    status: str,
) -> Report:
    on_cuda = capture.environment.device_kind == "cuda"
    notes = (
        "Shares come from a traced run, every wall time from runs without a profiler.",
        f"Device time is the sum of raw kernel events of one step ({which_step(options.steps)})."
        if on_cuda
        else "On a CPU a launch is one ATen op call that computes, and device time the sum of their durations.",
        "A launch has the category of its ATen op; one without an op (a replayed graph, Inductor) has that of its kernel's name.",
        "The byte floor uses the copy bandwidth measured in this run; savings before a run are upper bounds and do not add up.",
    )
    return Report(
        run_id=options.run_id,
        folder=str(options.run_dir or ""),
        config_hash=options.config_hash,
        status=status,
        command=options.command,
        workload=capture.workload,
        environment=capture.environment,
        quality=capture.quality,
        bandwidth=capture.bandwidth,
        before=step_profile.step_profile("eager", capture.eager_launches, wall=capture.eager_step),
        captured=replace(step_profile.step_profile("captured", capture.launches), timeline=None),  # no view draws it
        after=None,
        chains=plan.chains,
        answers=plan.answers,
        findings=findings,
        launch_verdict=judge_launches(capture, plan.chains, plan.answers),
        durations_s=tuple(clock.durations_s),
        notes=(*notes, *written_notes(written)),
    )


@contextmanager
def on_device(loaded: LoadedWorkload, stage: str) -> Iterator[None]:
    """Make the workload's device the current one, and turn running out of memory into the error that says what to try.

    Args:
        loaded: the workload.
        stage: what is being done, in words.
    """
    try:
        with current_device(torch.device(loaded.record.device)):
            yield
    except (RuntimeError, MemoryError) as error:
        # After a fault on the GPU whatever puts tensors back fails too: the first error says more than these.
        if (fault := first_fault(error)) is not None:
            raise fault from fault.__cause__
        if is_out_of_memory(error):
            device = torch.device(loaded.record.device)
            raise out_of_memory(stage=stage, device=device, request=loaded.request, error=error) from error
        raise
