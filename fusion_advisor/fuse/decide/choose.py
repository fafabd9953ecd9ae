"""Chooses the rewrites that stay: graph passes and the fusions that passed by themselves, all timed in the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch.fx import GraphModule

from fusion_advisor.fuse.cuda_graph.capturable import host_work
from fusion_advisor.fuse.decide.alone import savings_alone
from fusion_advisor.fuse.decide.exact import inexact_passes
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.keep_rule import Decision, keep_all
from fusion_advisor.fuse.decide.predict import estimates, launch_cost_ns, price_passes
from fusion_advisor.fuse.decide.session import Bench, BuiltFusion, Step, Variant
from fusion_advisor.fuse.decide.step_runner import Candidate, StepRunner
from fusion_advisor.fuse.decide.verdict import Verdict, span_of
from fusion_advisor.fuse.passes.constant_folding import FOLD_CONSTANTS
from fusion_advisor.fuse.passes.in_trace import LAYOUTS
from fusion_advisor.fuse.passes.registry import PASSES, row_of
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.rewrite.graph_rewriter import LayoutChanged
from fusion_advisor.fuse.rewrite.record import PassRewrite
from fusion_advisor.records import Capture, Fusion, GraphRewrite, Status
from fusion_advisor.timing.host_timer import CPU_TIME
from fusion_advisor.timing.interleaving import Difference


def choose(
    bench: Bench, fusions: list[Fusion], built: list[BuiltFusion], options: ApplyOptions, progress: Progress, *, budget_s: float,
    instruments: Instruments = MEASURED, capture: Capture | None = None, predicts: bool = True,
) -> tuple[Decision, tuple[GraphRewrite, ...], list[Fusion], list[BuiltFusion]]:  # fmt: skip
    """Time graph passes and fusions in the step and keep what pays.

    Args:
        bench: the live capture.
        fusions: all that were tried.
        built: those that may stay.
        options: the keep rule's thresholds.
        progress: gets a line on how the step is timed.
        budget_s: seconds for the timing.
        instruments: time the step and decide.
        capture: of the step; with it a GPU's step is timed with what may pay alone, and graph passes have what they were
            expected to save.
        predicts: time what each pass saves alone, for a report; nothing is decided by that.

    Returns:
        The decision, the graph rewrites and all fusions with their verdicts, and the fusions that stay.
    """
    every, names, tried = _passes_with_sites(bench, options, instruments)
    by_gain = sorted(built, key=lambda item: -_predicted(fusions, item))
    candidates = [
        *(Candidate(id=name, graph_pass=name) for name in tried),
        *(Candidate(id=item.planned.id, fusion=item) for item in by_gain),
    ]
    refused = layout_refusals(bench, candidates)
    tried = [name for name in tried if name not in refused]
    candidates = [candidate for candidate in candidates if candidate.id not in refused]
    timed_passes: dict[str, Difference] = {}
    if options.is_timed:
        decision = _timed(
            bench, candidates, fusions, built, options, progress, budget_s=budget_s, instruments=instruments, capture=capture,
            timed_passes=timed_passes,
        )  # fmt: skip
        _tell(candidates, decision, fusions, progress)
    else:
        decision = keep_all(bench, candidates)
    decision = replace(decision, verdicts={**decision.verdicts, **refused})
    rewrites = list(_not_kept(bench))
    for name in names:
        # What a layout changes was timed before there were kernels for it: nothing is left to predict.
        is_asked = predicts and PASSES[name].is_in_trace and name not in LAYOUTS and options.is_timed and name in tried
        timed_ns = _saving_ns(timed_passes.get(name), bench, tried, name, instruments) if is_asked else None
        rewrites.append(_pass_row(PASSES[name], every, decision.verdicts.get(name), timed_ns))
    if capture is not None and predicts:
        cost_ns = launch_cost_ns(capture.launches, decision.untouched_ns, rewrites, most_ns=capture.bandwidth.launch_ns)
        rewrites = list(price_passes(rewrites, bench, capture, cost_ns))
    bench.forget_passes()
    judged = [_with_verdict(fusion, decision.verdicts.get(fusion.id)) for fusion in fusions]
    kept = {fusion.id for fusion in judged if fusion.status is Status.KEPT}
    return decision, tuple(rewrites), judged, [item for item in by_gain if item.planned.id in kept]


def _timed(
    bench: Bench,
    candidates: Sequence[Candidate],
    fusions: Sequence[Fusion],
    built: Sequence[BuiltFusion],
    options: ApplyOptions,
    progress: Progress,
    *,
    budget_s: float,
    instruments: Instruments,
    capture: Capture | None,
    timed_passes: dict[str, Difference],
) -> Decision:
    """Decide by the step's times; ``timed_passes`` gets what was timed of passes by themselves, others as for :func:`choose`."""
    passes = [one.graph_pass for one in candidates if one.graph_pass]
    chains = {item.planned.chain.id: item.planned.chain for item in built}
    alone: dict[str, Difference] = {}
    if options.effort != "thorough" and (bench.on_cuda or bench.timer.method == CPU_TIME):
        timed = [fusion for fusion in fusions if fusion.chain_id in chains]
        alone = savings_alone(timed, {name: chain.runs for name, chain in chains.items()}, options.confidence)

    def estimated() -> dict[str, Difference]:
        if options.effort == "thorough":
            return {}
        if bench.on_cuda:
            return {} if capture is None else estimates(fusions, chains, passes, bench, capture, options.confidence)
        found = {name: instruments.change_alone(*_with_and_without(bench, passes, name), options.confidence) for name in passes}
        timed_passes.update({name: change for name, change in found.items() if change is not None})
        return timed_passes

    verdicts = _in_every_step(bench, passes, options)
    decision = instruments.decide(
        bench, [one for one in candidates if one.id not in verdicts], min_gain=options.min_gain, confidence=options.confidence,
        budget_s=budget_s, note=progress.note, step=progress.step, alone=alone, estimates=estimated, given=list(verdicts),
    )  # fmt: skip
    gained_ns = sum(verdict.delta_ns for verdict in verdicts.values())
    return replace(decision, verdicts={**decision.verdicts, **verdicts}, untouched_ns=decision.untouched_ns - gained_ns)


def _in_every_step(bench: Bench, passes: Sequence[str], options: ApplyOptions) -> dict[str, Verdict]:
    """Return the verdicts on passes that are in every step that is timed, in the order of trying."""
    laid_out = {name: _of_layout(name, bench) for name in passes if name in LAYOUTS}
    constants = first_of_all(bench, passes) if options.graph and bench.on_cuda else ()
    return {**laid_out, **{name: _given(name) for name in constants}}


def _host_work(module: GraphModule) -> str | None:
    """What no graph can hold; where ranks cannot record their collectives, no graph is asked for."""
    return host_work(module, holds_collectives=True)


def first_of_all(
    bench: Bench, passes: Sequence[str], host_work: Callable[[GraphModule], str | None] = _host_work
) -> tuple[str, ...]:
    """Return the pass without which no CUDA graph can hold the step: the host makes constants in it, and copies them over.

    Args:
        bench: over the graphs as captured.
        passes: that may stay.
        host_work: says what the host does in a region.
    """
    name = FOLD_CONSTANTS.id
    if name not in passes or not any(map(host_work, bench.with_passes(()).modules)):
        return ()
    return () if any(map(host_work, bench.with_passes([name]).modules)) else (name,)


def _of_layout(name: str, bench: Bench) -> Verdict:
    """Return the verdict on copies that are in the captured graph, because the step was no slower with them."""
    trial = bench.live.layouts.get(name)
    if trial is None or trial.change is None:
        return replace(_given(name), reason="kernels are made for the layouts that it gives")
    change = trial.change
    span = (change.low_ns, change.high_ns)
    fused = "" if trial.fused is None else f", {trial.fused.reason}"
    reason = f"{span_of(change.median_ns, span)} with it alone{fused}; kernels are made for the layouts that it gives"
    return Verdict(id=name, status=Status.KEPT, reason=reason, delta_ns=change.median_ns, interval_ns=span)


def _not_kept(bench: Bench) -> Iterator[GraphRewrite]:
    """Return rows of copies that were taken out of the captured graph, because the step was slower with them."""
    for name, trial in bench.live.layouts.items():
        if not trial.is_kept and trial.change is not None:
            span = (trial.change.low_ns, trial.change.high_ns)
            fused = "" if trial.fused is None else f", {trial.fused.reason}"
            reason = f"{span_of(trial.change.median_ns, span)} with it alone{fused}: the step became slower"
            row = row_of(PASSES[name], status=Status.SLOWER, reason=reason, sites=trial.sites)
            yield replace(row, step_delta_ns=trial.change.median_ns, step_delta_ci_ns=span)


def _given(name: str) -> Verdict:
    reason = "it lets a CUDA graph hold the step, and is in every step that was timed"
    return Verdict(id=name, status=Status.KEPT, reason=reason, delta_ns=0, interval_ns=(0, 0), is_timed=False)


def _passes_with_sites(bench: Bench, options: ApplyOptions, instruments: Instruments) -> tuple[Variant, list[str], list[str]]:
    """Find the graph passes that change this step.

    Returns:
        The step with all passes that the options allow, the names of those that found a site, and of those that are to be timed:
        with --exact a pass that changes a bit of the results is not.
    """
    found = [name for name, one in PASSES.items() if options.wants(name) and (options.freeze or not one.needs_freeze)]
    every = bench.with_passes(found)
    names = [name for name in found if every.changed[name]]
    inexact = inexact_passes(bench, names, instruments.worst) if options.exact else frozenset[str]()
    return every, names, [name for name in names if name not in inexact]


def _tell(candidates: Sequence[Candidate], decision: Decision, fusions: Sequence[Fusion], progress: Progress) -> None:
    """Show each kept gain as soon as it is known."""
    kernels = {fusion.id: fusion.kernel for fusion in fusions}
    for candidate in candidates:
        verdict = decision.verdicts.get(candidate.id)  # none for what is in every step that was timed
        if verdict is not None and verdict.status is Status.KEPT:
            name = f"{candidate.id} {kernels.get(candidate.id, '')}".rstrip()
            span = f": {span_of(verdict.delta_ns, verdict.interval_ns)}" if verdict.is_timed else ""
            progress.found(f"{name}{span}")


def _pass_row(rewrite: PassRewrite, every: Variant, verdict: Verdict | None, timed_ns: int | None) -> GraphRewrite:
    """Return a graph pass's row.

    Args:
        rewrite: its record.
        every: the step with all passes in place.
        verdict: None where it was left out, because it changes bits.
        timed_ns: what it saves alone, where that was timed.
    """
    sites = every.changed[rewrite.id]
    if verdict is None:
        reason = "with --exact: the step's results have other bits with it"
        return row_of(rewrite, status=Status.NOT_REPLACED, reason=reason, sites=sites)
    kept_bytes = sum(rewrite.held_bytes(module.graph) for module in every.modules)
    return replace(
        row_of(rewrite, status=verdict.status, reason=verdict.reason, sites=sites),
        reason=f"{verdict.reason}; {kept_bytes:,} bytes of derived tensors stay in memory" if kept_bytes else verdict.reason,
        step_delta_ns=verdict.step_delta_ns,
        step_delta_ci_ns=verdict.step_delta_ci_ns,
        timed_with=verdict.timed_with,
        is_timed_alone=verdict.is_timed_alone,
        held_bytes=kept_bytes if verdict.status is Status.KEPT else 0,
        predicted_saving_ns=timed_ns,
    )


def _with_verdict(fusion: Fusion, verdict: Verdict | None) -> Fusion:
    if verdict is None:
        return fusion
    return replace(
        fusion,
        status=verdict.status,
        reason=verdict.reason,
        step_delta_ns=verdict.step_delta_ns,
        step_delta_ci_ns=verdict.step_delta_ci_ns,
        timed_with=verdict.timed_with,
        is_timed_alone=verdict.is_timed_alone,
    )


def _saving_ns(timed: Difference | None, bench: Bench, names: Sequence[str], name: str, instruments: Instruments) -> int | None:
    """Return what a pass saves alone, on top of the passes before it; ``timed`` where it was measured already."""
    if timed is not None:
        return -timed.median_ns
    return instruments.saving_alone_ns(*_with_and_without(bench, names, name))


def _with_and_without(bench: Bench, names: Sequence[str], name: str) -> tuple[StepRunner, Step, Step]:
    """Return the step with the passes that come before one of ``names``, and the same with that one."""
    before = list(names[: names.index(name)])
    without, with_it = (Step(bench=bench, variant=bench.with_passes(passes)) for passes in (before, [*before, name]))
    return StepRunner(bench), without, with_it


def _predicted(fusions: Sequence[Fusion], item: BuiltFusion) -> int:
    return next(fusion.predicted_saving_ns or 0 for fusion in fusions if fusion.id == item.planned.id)


def layout_refusals(bench: Bench, candidates: Sequence[Candidate]) -> dict[str, Verdict]:
    """Find rewrites that do not go together: one may lay a tensor out differently than a kernel of ours was verified for.

    The step runs once with all of them; where a kernel refuses a tensor, they are added one by one, and each that makes one
    refuse is left out before anything is timed.

    Args:
        bench: what its step moves on is put back first.
        candidates: in the order of trying; an earlier one stays where it does not go together with a later one.

    Returns:
        By id the verdict of each that is left out; nearly always none.
    """
    if not candidates or _layout_refusal(bench, candidates) is None:
        return {}
    stay: list[Candidate] = []
    refused = {}
    for candidate in candidates:
        reason = _layout_refusal(bench, [*stay, candidate])
        if reason is None:
            stay.append(candidate)
        else:
            refused[candidate.id] = Verdict(
                id=candidate.id, status=Status.NOT_REPLACED, reason=reason, delta_ns=0, interval_ns=(0, 0), is_timed=False
            )
    return refused


def _layout_refusal(bench: Bench, candidates: Sequence[Candidate]) -> str | None:
    fusions = [candidate.fusion for candidate in candidates if candidate.fusion is not None]
    variant = bench.build(fusions, [candidate.graph_pass for candidate in candidates if candidate.graph_pass])
    bench.live.written.rewind()
    try:
        bench.run(variant)
    except LayoutChanged as change:
        return f"a value inside the model is laid out differently with it than when it was traced ({change})"
    return None
