"""Which rewrites stay: each fusion by itself first, then all of them in the step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fusion_advisor import units
from fusion_advisor.autotune.tune import MUST_GAIN
from fusion_advisor.codegen.registry import backends_for
from fusion_advisor.fuse.decide.graph_diff_cost import saving_alone_ns
from fusion_advisor.fuse.decide.keep_rule import Candidate, Decision, StepRunner, decide, keep_all
from fusion_advisor.fuse.decide.result_bits import inexact_passes
from fusion_advisor.fuse.decide.session import BIASES, FROZEN, PASSES, Bench, BuiltFusion, step_of
from fusion_advisor.fuse.decide.trial import Trial, try_fusion
from fusion_advisor.fuse.passes.constant_folding import frozen_bytes, held_bytes
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.plan import Plan
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.ir.program import Program
from fusion_advisor.records import Fusion, GraphRewrite, Status

FASTEST = "fastest"


def try_all(
    bench: Bench, plan: Plan, options: ApplyOptions, progress: Progress, so_far: Callable[[list[Fusion]], None]
) -> tuple[list[Fusion], list[BuiltFusion]]:
    """Try every planned fusion by itself.

    Args:
        bench: the live capture; observes the fusions' sites first.
        plan: what to try.
        options: backend, fast_math, run directory. ``fastest`` tries each kernel in Triton and in CUDA C++,
            None those that Triton is known to be slower at.
        progress: told about each.
        so_far: given all fusions tried, after each.

    Returns:
        Every fusion with what is known of it, and the ones that go on to be timed in the step.
    """
    bench.observe(plan.fusions)
    fusions: list[Fusion] = []
    built: list[BuiltFusion] = []
    with kernel_dir_of(options) as kernel_dir:
        for number, planned in enumerate(plan.fusions):
            progress.step(number, len(plan.fusions), f"{planned.id} {planned.match.kernel}: build, check, time")
            backends = backends_of(options.backend, planned.program, on_cuda=bench.on_cuda)
            trials = [
                try_fusion(
                    bench,
                    planned,
                    backend=backend,
                    fast_math=options.fast_math,
                    tolerance=options.tolerance,
                    kernel_dir=kernel_dir,
                    seed=number,
                    with_nvtx=options.nvtx,
                    is_timed=options.is_timed,
                    log=progress.note,
                )
                for backend in backends
            ]
            trial = faster_of(trials)
            for other, backend in zip(trials, backends, strict=True):
                if other.fusion.status in (Status.BUILD_FAILED, Status.WRONG_NUMBERS):
                    words = f"{planned.id} {planned.match.kernel} in {backend}: {other.fusion.reason}"
                    progress.warn(words) if trial.built is None else progress.note(words)
            fusions.append(trial.fusion)
            if trial.built is not None:
                built.append(trial.built)
            so_far(fusions)
    return fusions, built


def backends_of(asked: str | None, program: Program, *, on_cuda: bool) -> tuple[str, ...]:
    """Return the languages that a kernel is tried in, the preferred one first.

    Args:
        asked: for a backend or ``fastest``; None leaves it to the device and the kernel.
        program: what the kernel computes.
        on_cuda: whether the device is a GPU.
    """
    first, *others = backends_for("cuda" if on_cuda else "cpu")
    if asked is None:
        others = [one for one in others if one.is_available() and one.is_worth_a_trial(program)]
    return (first.name, *(one.name for one in others)) if asked in (None, FASTEST) else (asked,)


def faster_of(trials: Sequence[Trial]) -> Trial:
    """Return the first trial that may stay, or a later one that is faster alone by more than chance; it tells the others' times.

    Args:
        trials: of one fusion, in the order of preference. Where none may stay, the first one says why;
            where none was timed, the first that may stay is returned.
    """
    passed = [trial for trial in trials if trial.built is not None and trial.fusion.chain_after is not None]
    if not passed:
        return next((trial for trial in trials if trial.built is not None), trials[0])
    chosen = passed[0]
    for other in passed[1:]:
        if _alone_ns(other) < (1 - MUST_GAIN) * _alone_ns(chosen):
            chosen = other
    others = [f"{_backend(trial)} {units.duration(_alone_ns(trial))}" for trial in passed if trial is not chosen]
    if not others:
        return chosen
    (kernel,) = chosen.fusion.rendered
    tuning = f"{kernel.tuning}; alone {units.duration(_alone_ns(chosen))}, {', '.join(others)}"
    return replace(chosen, fusion=replace(chosen.fusion, rendered=(replace(kernel, tuning=tuning),)))


def _alone_ns(trial: Trial) -> int:
    assert trial.fusion.chain_after is not None
    return trial.fusion.chain_after.median_ns


def _backend(trial: Trial) -> str:
    return trial.fusion.rendered[0].backend


@contextmanager
def kernel_dir_of(options: ApplyOptions) -> Iterator[Path]:
    """Where sources are built: in the run directory; without one where they are gone afterwards, as compilers read them once."""
    if options.run_dir is None:
        with tempfile.TemporaryDirectory(prefix="fusion-advisor-") as folder:
            yield Path(folder)
        return
    kernel_dir = options.run_dir / "kernels"
    kernel_dir.mkdir(parents=True, exist_ok=True)
    yield kernel_dir


def choose(
    bench: Bench, fusions: list[Fusion], built: list[BuiltFusion], options: ApplyOptions, progress: Progress, *, budget_s: float
) -> tuple[Decision, tuple[GraphRewrite, ...], list[Fusion], list[BuiltFusion]]:
    """Time graph passes and fusions in the step and keep what pays.

    Args:
        bench: the live capture.
        fusions: all that were tried.
        built: those that may stay.
        options: the keep rule's thresholds.
        progress: told how the step is timed.
        budget_s: seconds for the timing.

    Returns:
        The decision, the graph rewrites and all fusions with their verdicts, and the fusions that stay.
    """
    names = [name for name in PASSES if options.freeze or name != FROZEN]
    every = bench.build((), names)
    changed = every.changed
    frozen = sum(frozen_bytes(module.graph) for module in every.modules)
    held = {"fold_constants": sum(held_bytes(module.graph) for module in every.modules) - frozen, FROZEN: frozen}
    numbers = {name: number for number, name in enumerate(PASSES, start=1)}
    passes = [Candidate(id=f"R{numbers[name]}", graph_pass=name) for name in names if changed[name]]
    by_gain = sorted(built, key=lambda item: -_predicted(fusions, item))
    inexact = inexact_passes(bench, [candidate.graph_pass for candidate in passes]) if options.exact else frozenset[str]()
    tried = [candidate for candidate in passes if candidate.graph_pass not in inexact]
    candidates = [*tried, *(Candidate(id=item.planned.id, fusion=item) for item in by_gain)]
    if options.is_timed:
        decision = decide(
            bench, candidates, min_gain=options.min_gain, confidence=options.confidence, budget_s=budget_s, note=progress.note
        )
    else:
        decision = keep_all(bench, candidates)
    rewrites = []
    for candidate in passes:
        if candidate.graph_pass in inexact:
            rewrites.append(
                GraphRewrite(
                    id=candidate.id, name=PASSES[candidate.graph_pass][0], status=Status.NOT_REPLACED,
                    reason="with --exact: the step's results have other bits with it", sites=changed[candidate.graph_pass],
                )
            )  # fmt: skip
            continue
        verdict = decision.verdicts[candidate.id]
        held_for = held.get(candidate.graph_pass, 0)
        rewrites.append(
            GraphRewrite(
                id=candidate.id,
                name=PASSES[candidate.graph_pass][0],
                status=verdict.status,
                reason=f"{verdict.reason}; {held_for:,} bytes are held" if held_for else verdict.reason,
                sites=changed[candidate.graph_pass],
                step_delta_ns=verdict.step_delta_ns,
                step_delta_ci_ns=verdict.step_delta_ci_ns,
                held_bytes=held_for if verdict.status is Status.KEPT else 0,
                predicted_saving_ns=_apart_ns(bench, tried) if candidate.graph_pass == BIASES and options.is_timed else None,
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
                step_delta_ns=timed.step_delta_ns,
                step_delta_ci_ns=timed.step_delta_ci_ns,
            )
        )
    kept = {fusion.id for fusion in judged if fusion.status is Status.KEPT}
    return decision, tuple(rewrites), judged, [item for item in by_gain if item.planned.id in kept]


def _apart_ns(bench: Bench, passes: Sequence[Candidate]) -> int | None:
    """What biases apart are expected to save, on top of the passes that were timed before them."""
    names = [candidate.graph_pass for candidate in passes]
    before = names[: names.index(BIASES)]
    return saving_alone_ns(StepRunner(bench), step_of(bench, (), before), step_of(bench, (), [*before, BIASES]))


def _predicted(fusions: Sequence[Fusion], item: BuiltFusion) -> int:
    return next(fusion.predicted_saving_ns or 0 for fusion in fusions if fusion.id == item.planned.id)


def kept_passes(rewrites: Sequence[GraphRewrite]) -> list[str]:
    """Return the graph passes that were kept, by name; the merging of GEMMs is no pass of :data:`PASSES`."""
    by_title = {title: name for name, (title, _) in PASSES.items()}
    kept = [rewrite.name for rewrite in rewrites if rewrite.status is Status.KEPT]
    return [by_title[title] for title in kept if title in by_title]
