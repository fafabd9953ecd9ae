"""Chooses the rewrites that stay: each fusion is tried by itself first, then all of them in the step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from fusion_advisor import units
from fusion_advisor.autotune.build_ahead import BuildAhead, Job, LinearJob
from fusion_advisor.autotune.tune import MUST_GAIN, jobs_of
from fusion_advisor.codegen.common.descriptor import Backend
from fusion_advisor.codegen.registry import backends_for
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.session import Bench, BuiltFusion
from fusion_advisor.fuse.decide.trial import Trial, try_fusion, untried
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.plan import Plan, PlannedFusion
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.rewrite.device_memory import release_cached_memory
from fusion_advisor.ir.program import Program
from fusion_advisor.records import Fusion, Status
from fusion_advisor.verify.known.passed_checks import PassedChecks
from fusion_advisor.workload.device import fault_of, is_out_of_memory

FASTEST = "fastest"
NO_MEMORY = "no memory is left to check its numbers against fp64"


def try_all(
    bench: Bench,
    plan: Plan,
    options: ApplyOptions,
    progress: Progress,
    so_far: Callable[[list[Fusion]], None],
    instruments: Instruments = MEASURED,
    ahead: BuildAhead | None = None,
    later: Callable[[], Iterable[Job | LinearJob]] = tuple,
    passed: PassedChecks | None = None,
) -> tuple[list[Fusion], list[BuiltFusion]]:
    """Try every planned fusion by itself.

    Args:
        bench: the live capture; observes the fusions' sites.
        plan: what to try.
        options: backend, fast_math, run directory. ``fastest`` tries each kernel in Triton and in CUDA C++,
            None those that Triton is known to be slower at.
        progress: gets a line about each.
        so_far: given all fusions tried, after each.
        instruments: time each kernel against the ops that it replaces.
        ahead: compiles all kernels from the start.
        later: says what stages after this one will have compiled; it is found while the first kernels are.
        passed: checks that no size decides; gets those that pass here.

    Returns:
        Every fusion with what is known of it, and the ones that go on to be timed in the step.

    Raises:
        KernelFaulted: a kernel faulted on a GPU, where nothing can run any more; ``so_far`` has its row by then.
    """
    if ahead is not None:
        submit(ahead, bench, plan.fusions, options)
        ahead.submit(later())
    bench.observe(plan.fusions)  # while the first kernels are compiled
    fusions: list[Fusion] = []
    built: list[BuiltFusion] = []
    with kernel_dir_of(options) as kernel_dir:
        for number, planned in enumerate(plan.fusions):
            progress.step(number, len(plan.fusions), f"{planned.id} {planned.match.kernel}: build, check, time")
            backends = backends_of(options.backend, planned.program, on_cuda=bench.on_cuda)
            try:
                trials = _trials(bench, planned, backends, options, kernel_dir, number, progress, instruments, ahead, passed)
            except torch.AcceleratorError as error:
                fault = fault_of(planned.match.kernel, error)
                so_far([*fusions, replace(untried(planned), status=Status.BUILD_FAILED, reason=str(fault))])
                raise fault from error
            trial = faster_of(trials)
            _tell_failures(planned, trials, backends, progress.warn if trial.built is None else progress.note)
            fusions.append(trial.fusion)
            if trial.built is not None:
                built.append(trial.built)
            so_far(fusions)
    return fusions, built


def _trials(
    bench: Bench, planned: PlannedFusion, backends: Sequence[str], options: ApplyOptions, kernel_dir: Path, seed: int,
    progress: Progress, instruments: Instruments, ahead: BuildAhead | None, passed: PassedChecks | None,
) -> list[Trial]:  # fmt: skip
    """Try one fusion in each language; where memory ends on the way, it is left out and the others go on."""
    found = []
    for backend in backends:
        try:
            trial = try_fusion(
                bench,
                planned,
                backend=backend,
                fast_math=options.fast_math,
                tolerance=options.tolerance,
                kernel_dir=kernel_dir,
                seed=seed,
                with_nvtx=options.nvtx,
                is_timed=options.is_timed and not options.dry_run,
                log=progress.note,
                compare=instruments.compare_alone,
                tune=instruments.tune,
                worst=instruments.worst,
                ahead=ahead,
                passed=passed,
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            trial = None
            instruments.worst(NO_MEMORY)  # the other ranks wait for an answer
        if trial is None:  # past the handler: what the failed trial held is free by now
            release_cached_memory()
            trial = Trial(fusion=replace(untried(planned), status=Status.NOT_REPLACED, reason=NO_MEMORY), built=None)
        found.append(trial)
    return found


def submit(ahead: BuildAhead, bench: Bench, fusions: Sequence[PlannedFusion], options: ApplyOptions) -> None:
    """Have every launch shape that will be tried compiled, in the order of trying.

    Args:
        ahead: compiles.
        bench: of the fusions.
        fusions: what will be tried.
        options: backend and fast_math.
    """
    for planned in fusions:
        for backend in backends_of(options.backend, planned.program, on_cuda=bench.on_cuda):
            jobs = jobs_of(
                planned.program, planned.tunables, backend, bench.device, header=planned.header, fast_math=options.fast_math
            )
            ahead.submit(jobs)


def _tell_failures(planned: PlannedFusion, trials: Sequence[Trial], backends: Sequence[str], say: Callable[[str], None]) -> None:
    for trial, backend in zip(trials, backends, strict=True):
        if trial.fusion.status in (Status.BUILD_FAILED, Status.WRONG_NUMBERS):
            say(f"{planned.id} {planned.match.kernel} in {backend}: {trial.fusion.reason}")


def backends_of(
    asked: str | None, program: Program, *, on_cuda: bool, is_available: Callable[[Backend], bool] = Backend.is_available
) -> tuple[str, ...]:
    """Return the languages that a kernel is tried in, the preferred one first.

    Args:
        asked: for a backend or ``fastest``; None leaves it to the device and the kernel.
        program: what the kernel computes.
        on_cuda: whether the device is a GPU.
        is_available: whether a backend's compiler is installed.
    """
    first, *others = backends_for("cuda" if on_cuda else "cpu")
    if asked is None:
        others = [one for one in others if is_available(one) and one.is_worth_a_trial(program)]
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
