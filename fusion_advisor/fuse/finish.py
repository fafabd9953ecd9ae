"""The last stage: the kept rewrites in the live model, its numbers as a whole, and what it costs now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_advisor import units
from fusion_advisor.capture.trace.attribute import Step
from fusion_advisor.errors import AdvisorError
from fusion_advisor.fuse.baselines.contenders import Contender, measure_all, ours_compiled, peers
from fusion_advisor.fuse.cuda_graph.recording import CudaRecorder, Recorder
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide import step_profile
from fusion_advisor.fuse.decide.keep_rule import Decision, StepRunner, confirmed
from fusion_advisor.fuse.decide.session import (
    PASSES,
    Bench,
    BuiltFusion,
    BuiltLinear,
    Variant,
    calls_in_step,
    replaced_sites,
    step_of,
)
from fusion_advisor.fuse.decide.try_fusions import kept_passes
from fusion_advisor.fuse.live import bisect
from fusion_advisor.fuse.live.cuda_graph_choice import TITLE, choose_graph, why_no_graph
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.model_check import check_whole_model
from fusion_advisor.fuse.live.saved_plan import measure_warm_up
from fusion_advisor.fuse.live.specialize import Kept, gemm_rows
from fusion_advisor.fuse.passes.layout_copy import kernels_of
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.fuse.rewrite.device_memory import needed_bytes
from fusion_advisor.fuse.rewrite.frozen_values import frozen_values
from fusion_advisor.fuse.stages import try_epilogues
from fusion_advisor.records import (
    EAGER,
    MERGED,
    OURS,
    Baseline,
    Capture,
    Fusion,
    GraphRewrite,
    Report,
    Status,
    StepProfile,
    Timing,
)
from fusion_advisor.runtime import torch_internals
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.interleaving import TURN_S
from fusion_advisor.workload.load import LoadedWorkload

WALL_S = 3.0
"""Seconds spent on each wall-time comparison."""
_GRAPH_S = 10.0
"""On that with and without a CUDA graph. In 3 s of steps of 60 ms, eight rounds, a step that the host launches op by op differed
from itself by 11 % (H200); steps of up to some milliseconds have all their rounds sooner."""
_MOST_SHAPES = 8
"""Shapes that ``dynamic="on_first_use"`` learns by itself."""


@dataclass(slots=True)
class AppliedRun:
    """A finished ``apply``: the fused model and its report."""

    fused: FusedModel
    report: Report
    capture: Capture
    parts: tuple[tuple[str, Report, Capture], ...] = ()
    """Further regimes of the same model, each with a report of its own: (folder, report, capture)."""

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
        progress: told what is found.
        clock: of the phases.
        linears: calls of linears with what is around them that stay, in place of the fusions whose ops they take in.
        on_report: given the report without the other ways to run the step, ahead of the minutes that these take.
    """
    found, passes = report, kept_passes(report.rewrites)
    has_rewrites = any(rewrite.status is Status.KEPT for rewrite in report.rewrites)
    variant = bench.build(built, passes, linears)
    report = replace(report, rewrites=tuple(_with_kernels(row, variant) for row in report.rewrites))
    measured = replace(
        report,
        status="applied",
        noise_share=decision.noise_share if options.is_timed else None,
        step_before=decision.before,
        step_after=decision.after,
        frozen=frozen_values(bench.live.regions, variant.modules),
        notes=(*report.notes, *_method_notes(decision, options, bench)),
    )
    original = torch_internals.original_call(loaded.model)
    kept = Kept(
        fusions=tuple(built), passes=tuple(passes), rows=gemm_rows(bench.ops), on_cuda=bench.on_cuda,
        has_merged=any(row.name == MERGED and row.status is Status.KEPT for row in report.rewrites),
        has_gemvs=any(one.id != try_epilogues.ID for one in linears),
        has_epilogues=any(one.id == try_epilogues.ID for one in linears),
        fast_math=options.fast_math, tolerance=options.tolerance,
    )  # fmt: skip
    recorder = graph_recorder(bench) if options.graph else None
    no_graph = why_no_graph(bench.live.breaks, bench.live.runs_of_regions())
    fused = FusedModel(
        loaded.model, bench.live.regions, variant.modules, loaded.args, loaded.kwargs, kept=kept,
        graphs=None if recorder is None or no_graph is not None else Graphs(recorder, outputs=options.graph_outputs),
        on_first_use=_MOST_SHAPES if options.dynamic == "on_first_use" else 0, live=bench.live,
    )  # fmt: skip

    rewind = bench.live.written.rewind

    def eager_call() -> Any:
        return original(*loaded.args, **loaded.kwargs)

    def fused_call() -> Any:
        return fused.dispatch(*loaded.args, **loaded.kwargs)

    graph: GraphRewrite | None = None
    if recorder is not None:
        name = f"R{len(PASSES) + 4}"  # after the passes and what is tried on top of them
        if fused.graphs is None:
            graph = GraphRewrite(id=name, name=TITLE, status=Status.NOT_REPLACED, reason=no_graph or "", sites=0)
        else:
            with clock.phase("CUDA graph"):
                graph = choose_graph(
                    fused, fused_call, fused_call if built or linears or has_rewrites else eager_call, name=name,
                    min_gain=options.min_gain, confidence=options.confidence, rounds=4 * options.runs, budget_s=_GRAPH_S,
                    least_s=options.min_time_s, wait=bench.wait, on_cuda=bench.on_cuda, rewind=rewind,
                    device_ns=decision.after.median_ns if decision.method == "cuda_graph" else None, is_timed=options.is_timed,
                )  # fmt: skip
        progress.note(f"{TITLE}: {graph.status}, {graph.reason}")
        report = replace(report, rewrites=(*report.rewrites, graph))
        measured = replace(measured, rewrites=report.rewrites)
    is_graphed = graph is not None and graph.status is Status.KEPT
    with_peers = bench.on_cuda if options.measures_compile is None else options.measures_compile
    eager = Contender(name=EAGER, make=lambda: eager_call, step=report.before, held_bytes=0, is_required=True)
    others = (
        peers(loaded, eager_call, on_cuda=bench.on_cuda, max_autotune=options.max_autotune, rewind=rewind) if with_peers else []
    )
    measuring: dict[str, Any] = {
        "needed_bytes": needed_bytes(loaded.model, loaded.args, loaded.kwargs), "on_cuda": bench.on_cuda, "runs": options.runs,
        "budget_s": WALL_S, "least_s": options.min_time_s, "traced_steps": options.steps, "rewind": rewind, "progress": progress,
    }  # fmt: skip
    if not built and not linears and not has_rewrites and not is_graphed:
        # The captured graph alone is no gain (it builds masks that eager skips): the model stays exactly as it was.
        before = report.before
        if others:
            with clock.phase("baselines"):
                rows = measure_all([eager, *others], **measuring)
            measured, before = replace(measured, baselines=_without_doubles(rows)), _step_of(rows, EAGER, "eager")
        unchanged = replace(
            measured, before=before, after=replace(before, label="unchanged"), durations_s=tuple(clock.durations_s)
        )
        fused.report = unchanged
        return AppliedRun(fused=fused, report=unchanged, capture=capture)
    with clock.phase("check the model"):
        with torch.no_grad():
            check = check_whole_model(loaded, eager_call, fused_call, bench.live.written, tolerance=options.tolerance)
        progress.note(f"error {check.fused_rel_l2:.1e} against {check.oracle}, eager {check.eager_rel_l2:.1e}")
    if not check.is_passed:
        with clock.phase("find what is wrong"):
            left = _without_guilty(loaded, bench, found, decision, built, options, progress, linears, eager_call)
        if left is not None:
            if fused.graphs is not None:
                fused.graphs.forget()
            return install(
                loaded, capture, bench, left.report, left.decision, left.built, options, progress, clock,
                linears=left.linears, on_report=on_report,
            )  # fmt: skip
    with clock.phase("measure after"):
        trace_to = options.run_dir / "trace.after.json.gz" if options.run_dir else None
        # A replay is one launch; which kernels ran, and for what, is seen when they are launched one by one.
        with launched_singly(fused):
            after_step = step_profile.trace_fused(bench, variant, fused_call, trace_to, traced_steps=options.steps)
        after = step_profile.step_profile(
            "fused", after_step.launches, device=decision.after if decision.method == "cuda_graph" else None
        )
    warm_up, cannot = None, ""
    with clock.phase("warm-up"):
        try:
            warm_up = measure_warm_up(loaded, capture, replace(measured, fusions=report.fusions), bench)
            progress.note(f"{warm_up.seconds:.1f} s from the saved plan to the first fused step")
        except AdvisorError as error:
            cannot = f"the plan could not be put in place a second time: {error}"
            progress.warn(cannot)
    held = sum(rewrite.held_bytes for rewrite in report.rewrites if rewrite.status is Status.KEPT)
    ours = Contender(
        name=OURS, make=lambda: fused_call, step=after, held_bytes=held, is_required=True,
        first_call_s=None if warm_up is None else warm_up.seconds, note="first call: from a saved plan, its kernels built before",
    )  # fmt: skip

    def early(rows: tuple[Baseline, ...]) -> None:
        so_far = replace(
            measured, before=_step_of(rows, EAGER, "eager"), after=_step_of(rows, OURS, "fused"), warm_up=warm_up,
            baselines=_without_doubles(rows), model_check=check, durations_s=tuple(clock.durations_s), status="interrupted",
        )  # fmt: skip
        on_report(so_far)

    with clock.phase("baselines"):
        rest = [ours_compiled(loaded, bench, variant, is_graphed=is_graphed)] if with_peers else []
        baselines = measure_all([eager, *others, ours, *rest], **measuring, on_required=early)
    before, after = (_step_of(baselines, name, label) for name, label in ((EAGER, "eager"), (OURS, "fused")))
    wall_before, wall_after = before.wall, after.wall
    assert wall_before is not None and wall_after is not None
    runs = bench.live.runs_of_regions()
    receipts = [_with_receipt(fusion, variant, after_step, runs) for fusion in report.fusions]
    refusal = _why_nothing_stays(
        check.is_passed,
        before.device_ns,
        after.device_ns,
        wall_before,
        wall_after,
        is_device_judged=bench.on_cuda and not is_graphed,
        is_time_judged=options.is_timed,
    )
    if refusal is None and options.is_timed and not bench.live.is_whole():
        refusal = _why_parts_do_not_pay(decision, wall_before, wall_after, options.confidence)
    warnings = [*report.warnings, *([cannot] if cannot else [])]
    if fused.fallbacks:
        warnings += [f"the fused model ran its original ops: {reason}" for reason in fused.fallbacks]
    if refusal is not None:
        progress.warn(refusal)
        warnings.append(refusal)
        receipts = [_reverted(fusion, refusal) for fusion in receipts]
        report = replace(report, rewrites=tuple(_reverted_rewrite(rewrite, refusal) for rewrite in report.rewrites))
    if refusal is None and not options.dry_run:
        fused.apply()
    elif fused.graphs is not None:
        fused.graphs.forget()
    captured = None if report.captured is None else replace(report.captured, device=decision.before if bench.on_cuda else None)
    final = replace(
        measured,
        rewrites=report.rewrites,
        before=before,
        captured=captured,
        after=after,
        baselines=_without_doubles(baselines),
        warm_up=warm_up,
        frozen=measured.frozen if refusal is None else (),
        fusions=tuple(receipts),
        model_check=check,
        durations_s=tuple(clock.durations_s),
        warnings=tuple(warnings),
    )
    fused.report = final
    return AppliedRun(fused=fused, report=final, capture=capture)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rest:
    """What stays without the guilty rewrites."""

    report: Report
    decision: Decision
    built: list[BuiltFusion]
    linears: tuple[BuiltLinear, ...]


def _without_guilty(
    loaded: LoadedWorkload,
    bench: Bench,
    report: Report,
    decision: Decision,
    built: Sequence[BuiltFusion],
    options: ApplyOptions,
    progress: Progress,
    linears: Sequence[BuiltLinear],
    eager_call: Callable[[], Any],
) -> _Rest | None:
    """Return what is left without the rewrites that make the whole model wrong; None where there is none to blame."""
    suspects = bisect.suspects_of(report, built, linears)
    guilty = bisect.guilty_in(loaded, bench, suspects, eager_call, tolerance=options.tolerance)
    if not guilty:
        return None
    names = {one.id for one in guilty}
    progress.warn(f"right alone, wrong in the whole model: {', '.join(sorted(names))}")
    left = [one for one in built if one.planned.id not in names]
    others = tuple(one for one in linears if one.id not in names)
    placed = replaced_sites(bench.build(left, (), others))
    dropped = bisect.without(report, guilty, tuple(placed))
    step, original = step_of(bench, left, kept_passes(dropped.rewrites), others), step_of(bench, (), ())
    budget_s = WALL_S if options.is_timed else 0.0
    timed = confirmed(StepRunner(bench), decision, original.run, step.run, budget_s=budget_s)
    return _Rest(report=dropped, decision=timed, built=left, linears=others)


def _step_of(rows: Sequence[Baseline], name: str, label: str) -> StepProfile:
    step = next(row.step for row in rows if row.name == name)
    assert step is not None  # a required contender's
    return replace(step, label=label)


def _without_doubles(rows: Sequence[Baseline]) -> tuple[Baseline, ...]:
    """Leave out the kernels of eager and ours, which stand in the report's before and after."""
    return tuple(
        replace(row, step=replace(row.step, kernels=())) if row.step is not None and row.name in (EAGER, OURS) else row
        for row in rows
    )


def _with_receipt(fusion: Fusion, variant: Variant, after_step: Step, runs: Sequence[int]) -> Fusion:
    """Fill in what the live model and the after-trace say; fusions that differ only in sizes share a kernel and its launches."""
    replaced = replaced_sites(variant)
    if fusion.id not in replaced:
        return fusion
    calls = calls_in_step(variant, runs)
    launches, refusals = 0, fusion.receipt.refusals
    for (owner, name), own in calls.items():
        if owner != fusion.id:
            continue
        called = sum(often for (_, other), often in calls.items() if other == name)
        seen = step_profile.launches_of(after_step, name)
        if seen != called:
            refusals = (*refusals, f"{name} was launched {seen} times where its sites call it {called} times")
        launches += own if seen == called else min(seen, own)
    receipt = replace(fusion.receipt, sites_replaced=replaced[fusion.id], launches_after=launches, refusals=refusals)
    return replace(fusion, receipt=receipt)


def _why_nothing_stays(
    is_passed: bool,
    before_ns: int,
    after_ns: int,
    wall_before: Timing,
    wall_after: Timing,
    *,
    is_device_judged: bool,
    is_time_judged: bool,
) -> str | None:
    """The whole-model gate: numbers pass and the step never becomes slower than eager, or everything is reverted.

    Without a graph, device time may not rise either: a wall time that the host decides would hide it. With ``keep="verified"`` no
    time is judged.
    """
    if not is_passed:
        return "the whole model's numbers do not pass: everything was reverted"
    if not is_time_judged:
        return None
    if is_device_judged and after_ns > before_ns:
        return (
            f"device time would rise from {before_ns / 1e6:.3f} to {after_ns / 1e6:.3f} ms against eager: everything was reverted"
        )
    if wall_after.ci_low_ns > wall_before.ci_high_ns:
        rise = f"from {wall_before.median_ns / 1e6:.2f} to {wall_after.median_ns / 1e6:.2f} ms"
        return f"the step would rise {rise}: everything was reverted"
    return None


def _why_parts_do_not_pay(decision: Decision, before: Timing, after: Timing, confidence: float) -> str | None:
    """The keep rule of a call that is more than its captured graphs: the whole of it must be measurably faster.

    The verdicts on single rewrites time the graphs one after the other. What lies between them they do not see: the model's own
    Python, and dynamo's guards in front of each graph.

    Args:
        decision: with the graphs' times.
        before: of the whole call, eager.
        after: of the whole call, fused, interleaved with it.
        confidence: of the interval.
    """
    change = interleaving.difference(before.times_ns, after.times_ns, confidence)
    if change.high_ns < 0:
        return None
    graphs = f"from {units.duration(decision.before.median_ns)} to {units.duration(decision.after.median_ns)}"
    interval = units.delta_interval(change.low_ns, change.high_ns)
    return (
        f"the whole call does not measurably pay ({units.delta(change.median_ns)} {interval} against eager), whatever its "
        f"captured graphs alone do ({graphs}): everything was reverted"
    )


def reverted(report: Report, reason: str) -> Report:
    """Return a report of which nothing stays in the model after all."""
    return replace(
        report,
        fusions=tuple(_reverted(fusion, reason) for fusion in report.fusions),
        rewrites=tuple(_reverted_rewrite(rewrite, reason) for rewrite in report.rewrites),
        frozen=(),
        warnings=(*report.warnings, reason),
    )


def graph_recorder(bench: Bench) -> Recorder | None:
    """Return what records CUDA graphs on the model's device; None on a CPU, which has none."""
    return CudaRecorder() if bench.on_cuda else None


@contextmanager
def launched_singly(fused: FusedModel) -> Iterator[None]:
    """Let a fused model run without its graph for a while."""
    if fused.graphs is None:
        yield
        return
    before, fused.graphs.is_on = fused.graphs.is_on, False
    try:
        yield
    finally:
        fused.graphs.is_on = before


def _reverted(fusion: Fusion, reason: str) -> Fusion:
    if fusion.status not in (Status.KEPT, Status.ABSORBED):
        return fusion
    receipt = replace(fusion.receipt, sites_replaced=0, launches_after=0)
    return replace(fusion, status=Status.NOT_REPLACED, reason=reason, receipt=receipt)


def _reverted_rewrite(rewrite: GraphRewrite, reason: str) -> GraphRewrite:
    return rewrite if rewrite.status is not Status.KEPT else replace(rewrite, status=Status.NOT_REPLACED, reason=reason)


def _with_kernels(row: GraphRewrite, variant: Variant) -> GraphRewrite:
    """Name the kernels that a kept rewrite put in, as files of the run."""
    made = [kernel for name in kept_passes([row]) for kernel in kernels_of(variant.modules, name)]
    return replace(row, rendered=tuple(replace(kernel, path=f"kernels/{row.id}_{kernel.path}") for kernel in made))


def _method_notes(decision: Decision, options: ApplyOptions, bench: Bench) -> tuple[str, ...]:
    how = {
        "cuda_graph": "replays of a CUDA graph of the captured step",
        "cuda_events": "CUDA events around the captured step (it could not be recorded into a CUDA graph)",
        "wall": "wall time of the captured step",
    }[decision.method]
    rounds = len(decision.before.times_ns)
    in_parts = (
        "The call runs Python of the model's own between its captured graphs: verdicts on single rewrites time the graphs alone, "
        "one after the other; the headline times the whole call, and what was kept stays only if that is measurably faster."
    )
    rest = decision.before.rest
    at_limit = (
        "The device's power limit holds the step down where it runs again and again. Single rewrites were timed where it does "
        f"not: the device rested {rest:g} times as long as each run took ahead of the next one. Wall times are of both: of steps "
        f"that run for {TURN_S} s at their turn (the mean of the middle half of them), and of single ones after such a rest."
    )
    if not options.is_timed:
        return (
            "What stays was not chosen by time (--keep verified): every rewrite whose numbers pass stays, faster or slower. "
            f"The times are of a few runs and decide nothing: {how}.",
            f"{len(bench.live.regions)} captured graph(s), run {len(bench.live.in_order())} time(s) in a step.",
        )
    return (
        f"Each rewrite was timed on top of the ones before it, interleaved: {how}; {rounds} rounds in the confirmation.",
        *([at_limit] if rest else []),
        f"A rewrite is kept when its whole {options.confidence:.0%} interval saves more than {options.min_gain:.1%} of the step "
        f"that it is put on, and more than the A/A noise ({decision.noise_share:.2%} of it). Several that are faster for "
        "certain, but each too little, are timed once more, as one, by the same rule.",
        f"{len(bench.live.regions)} captured graph(s), run {len(bench.live.in_order())} time(s) in a step.",
        *([] if bench.live.is_whole() else [in_parts]),
    )
