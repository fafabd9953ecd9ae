"""Traces and times the fused step, eager and the other ways to run the step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.errors import AdvisorError
from fusion_advisor.fuse.baselines.contenders import Contender, ours_compiled, peers
from fusion_advisor.fuse.baselines.measure_contenders import measure_all
from fusion_advisor.fuse.decide import step_profile
from fusion_advisor.fuse.installed import Installed, Job, Measured
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.rewrite.device_memory import needed_bytes
from fusion_advisor.records import COMPILED, EAGER, OURS, Baseline, ModelCheck, Status, StepProfile, Timing, WarmUp
from fusion_advisor.timing.wall_timer import as_timing

_LEAST_LIMIT_S = 20.0
_OVERHEAD_CALLS = 50
_QUICK_S = 1.0
"""For each way to run the step, with ``--quick``."""


def measure_after(installed: Installed, check: ModelCheck) -> Measured:
    """Trace the fused step, time a saved plan's first call, and time eager, ours and the other ways to run the step."""
    job, report = installed.job, installed.report
    with job.clock.phase("measure after"):
        trace_to = job.options.run_dir / "trace.after.json.gz" if job.options.run_dir else None
        # A replay is one launch; which kernels ran, and for what, is seen when they are launched one by one.
        with launched_singly(installed.fused):
            after_step = step_profile.trace_fused(
                job.bench, installed.variant, installed.fused_call, trace_to, traced_steps=job.options.steps
            )
            after_step = job.instruments.settled_step(after_step)
            overhead = call_overhead(installed.fused_call, job.bench.live.regions, job.bench.live.written.rewind)
    decision = installed.kept.decision
    device = decision.after if decision.method == "cuda_graph" else None
    after = step_profile.step_profile("fused", after_step.launches, device=device)
    held_bytes = sum(rewrite.held_bytes for rewrite in report.rewrites if rewrite.status is Status.KEPT)
    ours = Contender(
        name=OURS, make=lambda: installed.fused_call, step=after, held_bytes=held_bytes, is_required=True,
        note="first call: from a saved plan, its kernels built before",
    )  # fmt: skip
    answered_s: list[float] = []

    def early(rows: tuple[Baseline, ...]) -> None:
        if not answered_s:
            job.clock.split("before and after")
            answered_s.append(job.clock.elapsed_s())
        so_far = replace(
            report, before=profile_of(rows, EAGER, "eager"), after=profile_of(rows, OURS, "fused"), answer_s=answered_s[0],
            baselines=without_doubles(rows), model_check=check, durations_s=tuple(job.clock.durations_s), status="interrupted",
        )  # fmt: skip
        job.on_report(so_far)

    others = _others(job)
    with job.clock.phase("baselines"):
        rest = (
            [ours_compiled(job.loaded, job.bench, installed.variant, is_graphed=installed.is_graphed)]
            if job.with_peers and job.options.compile  # up to a minute, for what is no peer
            else []
        )
        rows = measure_all([_eager(installed), *others, ours, *rest], **_how(job), is_held=is_held(installed), on_required=early)
    answer_s = answered_s[0] if answered_s else job.clock.elapsed_s()
    warm_up, warnings = (None, ()) if job.options.effort == "quick" else _warm_up(installed)
    if warm_up is not None:
        rows = tuple(replace(row, first_call_s=round(warm_up.seconds, 3)) if row.name == OURS else row for row in rows)
    return Measured(
        check=check, after_step=after_step, baselines=rows, warm_up=warm_up, warnings=warnings, answer_s=answer_s,
        overhead=overhead,
    )  # fmt: skip


def call_overhead(call: Callable[[], Any], regions: Sequence[Region], rewind: Callable[[], object]) -> Timing | None:
    """Time a fused call whose graphs return at once what they returned before: what is left is Python around them.

    Args:
        call: the fused model on its example, launch by launch.
        regions: of its capture.
        rewind: puts back what a call moves on.

    Returns:
        Nanoseconds of the host per call; None where dynamo did not use what it had compiled for the capture.
    """
    routes = [region.route for region in regions if region.route is not None]
    if len(routes) < len(regions):
        return None
    times, before = [], [route.forward for route in routes]
    try:
        with torch.no_grad():
            rewind()
            call()  # a route's first call puts its graph in
            before = [route.forward for route in routes]
            found = [_Answer(route.forward) for route in routes]
            for route, answer in zip(routes, found, strict=True):
                route.forward = answer
            for number in range(_OVERHEAD_CALLS + 1):
                rewind()
                started = time.perf_counter_ns()
                call()
                if number:  # the first one computes the answers
                    times.append(time.perf_counter_ns() - started)
    finally:
        for route, forward in zip(routes, before, strict=True):
            route.forward = forward
        rewind()
    return as_timing(times, "wall") if all(answer.is_known for answer in found) else None


class _Answer:
    """Stands for a graph and returns each time what it returned the first time."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._result: Any = None
        self.is_known = False

    def __call__(self, *args: Any) -> Any:
        if not self.is_known:
            self._result, self.is_known = self._forward(*args), True
        return self._result


def _warm_up(installed: Installed) -> tuple[WarmUp | None, tuple[str, ...]]:
    """Time a saved plan's first call; where the plan cannot be put in again, a warning says so."""
    job = installed.job
    with job.clock.phase("warm-up"):
        try:
            warm_up = job.last.measure_warm_up(job.loaded, job.capture, installed.report, job.bench)
        except AdvisorError as error:
            cannot = f"the plan could not be put in place a second time: {error}"
            job.progress.warn(cannot)
            return None, (cannot,)
        job.progress.note(f"{warm_up.seconds:.1f} s from the saved plan to the first fused step")
        return warm_up, ()


def _eager(installed: Installed) -> Contender:
    job, report = installed.job, installed.report
    return Contender(name=EAGER, make=lambda: job.eager_call, step=report.before, held_bytes=0, is_required=True)


def _others(job: Job) -> list[Contender]:
    """The other ways to run the step, where they are asked for."""
    if not job.with_peers:
        return []
    found = peers(
        job.loaded, job.eager_call, on_cuda=job.bench.on_cuda, max_autotune=job.options.max_autotune,
        rewind=job.bench.live.written.rewind, limit_s=job.options.compile_limit_s,
    )  # fmt: skip
    if job.bench.on_cuda or job.options.is_peer_asked_for:
        return found
    # Nobody asked for it: a compiler may take as long as the run took so far, never longer.
    limit_s = max(_LEAST_LIMIT_S, sum(taken_s for _, taken_s in job.clock.durations_s))
    return [replace(one, limit_s=limit_s) for one in found if one.is_compiled]


def is_held(installed: Installed) -> bool | None:
    """Say whether the power limit holds eager or ours down, by what choosing rewrites found of replayed steps; None: not known.

    Where it does not hold replays down, it holds nothing down that the host launches. Where it does, ours may be launched.

    Args:
        installed: the fused model.
    """
    rest, job = installed.job.bench.rest, installed.job
    if rest is None or installed.kept.decision.method != "cuda_graph" or job.instruments.exchange is not None:
        return None
    return rest > 0 if installed.is_graphed or not rest else None


def _how(job: Job) -> dict[str, Any]:
    """How contenders are measured."""
    options, loaded = job.options, job.loaded
    budget_s = options.budgets.wall_s
    return {
        "needed_bytes": needed_bytes(loaded.model, loaded.args, loaded.kwargs), "on_cuda": job.bench.on_cuda,
        "runs": options.runs, "budget_s": min(budget_s, _QUICK_S) if options.effort == "quick" else budget_s,
        "least_s": options.min_time_s, "traced_steps": options.steps,
        "rewind": job.bench.live.written.rewind, "progress": job.progress, "instruments": job.instruments,
    }  # fmt: skip


def profile_of(rows: Sequence[Baseline], name: str, label: str) -> StepProfile:
    """Return the step of a contender that is always there.

    Args:
        rows: of all contenders.
        name: of the contender.
        label: of its step in the report.
    """
    step = next(row.step for row in rows if row.name == name)
    assert step is not None  # a required contender's
    return replace(step, label=label)


def without_doubles(rows: Sequence[Baseline]) -> tuple[Baseline, ...]:
    """Leave out the kernels of eager and ours, which stand in the report's before and after, and timelines that no view draws."""

    def slim(name: str, step: StepProfile) -> StepProfile:
        if name in (EAGER, OURS):
            return replace(step, kernels=(), timeline=None)
        return step if name.startswith(COMPILED) else replace(step, timeline=None)

    return tuple(row if row.step is None else replace(row, step=slim(row.name, row.step)) for row in rows)


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


def measure_others(installed: Installed) -> tuple[Baseline, ...]:
    """Time eager and the other ways to run the step, where nothing of ours stays; empty where these are not asked for."""
    others = _others(installed.job)
    if not others:
        return ()
    with installed.job.clock.phase("baselines"):
        return measure_all([_eager(installed), *others], **_how(installed.job))
