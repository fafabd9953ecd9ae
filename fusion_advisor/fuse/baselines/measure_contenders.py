"""Times contenders from the host's side: each is made ready by itself, then all run in turn, called as their users call them.

One that cannot be run stays in the table with the reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from fusion_advisor.capture.trace import profiler
from fusion_advisor.capture.trace.attribute import median_step
from fusion_advisor.fuse.baselines.attempt import Attempt
from fusion_advisor.fuse.baselines.contenders import Call, Contender
from fusion_advisor.fuse.baselines.failure import sentence_of
from fusion_advisor.fuse.baselines.liger import NotAvailable
from fusion_advisor.fuse.decide import step_profile
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.rewrite import device_memory
from fusion_advisor.records import Baseline, StepCheck, StepProfile, Timing
from fusion_advisor.runtime.gc_pause import old_objects_left_out
from fusion_advisor.runtime.torch_internals import dynamo, inductor
from fusion_advisor.timing.clock_sampler import is_at_power_limit
from fusion_advisor.timing.deadline import TimeIsUp, deadline
from fusion_advisor.timing.wall_timer import nothing

_log = logging.getLogger(__name__)

_WARM = {True: 3, False: 1}
"""Calls before one is measured, by whether it runs on a GPU: there a recorded step warms up, is recorded, is replayed."""

_LEAST_LIMIT_S, _TIMES_ANOTHER = 90.0, 4.0
"""Of a contender that is given up: it compiles less than the others do, by a way that nobody else takes."""

_PATIENCE = 3.0
"""Times the budget, for ways whose ratio is the run's headline and whose clock the power limit lets swing; eager and ours differ
by more than that."""

_FIRST_SHARE = 1 / 8
"""Of the time, for eager and ours ahead of the compilers: both are timed again with them, and the user waits for the answer."""


class Watch(Protocol):
    """What a row holds besides the step's time, where the step is a training step."""

    def check(self, way: Call) -> StepCheck | None:
        """Compare what a way computes with what eager does."""
        ...

    def larger(self, way: Call) -> Call | None:
        """Return the way's step with the optimizer's after it; None without an optimizer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    contender: Contender
    call: Call
    step: StepProfile
    first_call_s: float
    larger: Call | None = None
    larger_peak_bytes: int = 0
    check: StepCheck | None = None


def measure_all(
    contenders: Sequence[Contender],
    *,
    needed_bytes: int,
    on_cuda: bool,
    runs: int,
    budget_s: float,
    least_s: float = 0.0,
    traced_steps: int = 3,
    rewind: Callable[[], object] = nothing,
    is_held: bool | None = None,
    instruments: Instruments = MEASURED,
    progress: Progress | None = None,
    on_required: Callable[[tuple[Baseline, ...]], object] = lambda _: None,
    watch: Watch | None = None,
) -> tuple[Baseline, ...]:
    """Make contenders ready one by one, then time all of them in turn.

    Those that the run needs come first and are timed by themselves before a compiler is started: compilers take minutes, and a
    run that is ended meanwhile has its own result by then, and that of each compiler that was done.

    Args:
        contenders: in the table's order.
        needed_bytes: of weights and inputs, which each of them needs.
        on_cuda: wait for the device, and trace it.
        runs: rounds at most.
        budget_s: seconds for each contender.
        least_s: seconds for each contender at least, beyond ``runs``.
        traced_steps: how many steps are traced of those whose kernels are not known.
        rewind: called ahead of each run, untimed: it puts back what a step moves on.
        is_held: whether the power limit holds one of those down that the run needs, where that is known.
        instruments: time the runs.
        progress: is given each contender's name and, where it cannot be run, the reason.
        on_required: given the rows of those that the run needs, where there are others, and again with each that was compiled, or
            with each other way to run a training step.
        watch: of a training step.
    """
    progress = progress or Progress()
    how = _How(needed_bytes, on_cuda, runs, budget_s, least_s, traced_steps, rewind, is_held, instruments, watch)
    # On ranks compilers come first: a step with collectives that a CUDA graph cannot hold may end the run.
    in_order = sorted(contenders, key=lambda one: (not one.is_required, instruments.exchange is not None and not one.is_compiled))
    failed, ready = dict[str, Baseline](), list[_Ready]()
    # What each of them holds is asked for after a full collection, twice: 4 of them ahead of the answer.
    with torch.no_grad(), dynamo.raise_recompile_limit(1024), old_objects_left_out() if on_cuda else nullcontext():
        for number, contender in enumerate(in_order):
            if not contender.is_required:  # the others take no time to make ready
                if number and in_order[number - 1].is_required:
                    on_required(tuple(_timed_in_turn(ready, how).values()))
                    ready = [_checked(one, how) for one in ready]
                progress.step(number, len(contenders), contender.name)
            made = _made_ready_or_why_not(contender, ready, how)
            if isinstance(made, str):
                failed[contender.name] = Baseline(name=contender.name, note=made)
                progress.note(f"{contender.name}: {made}")
                continue
            ready.append(made)
            if not contender.is_required and (watch is not None or contender.is_compiled):
                on_required((*_timed_in_turn(ready, how).values(), *failed.values()))
        rows = _timed_in_turn(ready, how, is_last=True)
    return tuple({**rows, **failed}[contender.name] for contender in contenders)


@dataclass(frozen=True, slots=True)
class _How:
    """How contenders are measured; the fields are :func:`measure_all`'s."""

    needed_bytes: int
    on_cuda: bool
    runs: int
    budget_s: float
    least_s: float
    traced_steps: int
    rewind: Callable[[], object]
    is_held: bool | None
    instruments: Instruments
    watch: Watch | None


def _checked(one: _Ready, how: _How) -> _Ready:
    return one if how.watch is None or one.check is not None else replace(one, check=how.watch.check(one.call))


def _timed_in_turn(ready: Sequence[_Ready], how: _How, *, is_last: bool = False) -> dict[str, Baseline]:
    """Time contenders against each other; the last time for longer, and after rests where the power limit throttles one."""
    calls = [one.call for one in ready]
    larger = {number: one.larger for number, one in enumerate(ready) if one.larger is not None}
    all_s = how.budget_s * (len(ready) + len(larger)) * (1 if is_last else _FIRST_SHARE)
    has_peers = any(not one.contender.is_required for one in ready)
    timings = how.instruments.walls(
        [*calls, *larger.values()], on_cuda=how.on_cuda, runs=how.runs, budget_s=all_s, least_s=how.least_s,
        patience=_PATIENCE if has_peers else 1.0, rewind=how.rewind, timer=how.instruments.timer,
        is_held=how.is_held if how.is_held or not has_peers else None,
    )  # fmt: skip
    of_larger = dict(zip(larger, timings[len(ready) :], strict=True))
    rested: Sequence[Timing | None] = [None] * len(ready)
    if is_last and any(is_at_power_limit(wall.clocks) for wall in timings):
        # A quarter of the time: few rounds tell as much.
        rested = how.instruments.rested_walls(calls, runs=how.runs, budget_s=all_s / 4, rewind=how.rewind)
    return {
        one.contender.name: Baseline(
            name=one.contender.name,
            step=replace(one.step, wall=wall, rested=after_rest),
            first_call_s=one.first_call_s,
            note=one.contender.note,
            with_optimizer=of_larger.get(number),
            optimizer_peak_bytes=one.larger_peak_bytes,
            check=one.check,
        )
        for number, (one, wall, after_rest) in enumerate(zip(ready, timings[: len(ready)], rested, strict=True))
    }


def _made_ready_or_why_not(contender: Contender, ready: Sequence[_Ready], how: _How) -> _Ready | str:
    """Make a contender ready within its time limit, or say in one sentence why it is not; one that is required must succeed.

    Ranks make it ready together, and only its making and compiling are limited: what is interrupted between two collectives would
    leave the other ranks there.
    """
    longest_s = max([_LEAST_LIMIT_S, *(_TIMES_ANOTHER * one.first_call_s for one in ready if one.contender.is_compiled)])
    limit_s = None if contender.limit_s is None else contender.limit_s or longest_s
    attempt = Attempt(contender.name, None if contender.is_required else how.instruments.exchange, limit_s)
    try:
        with nullcontext() if limit_s is None or attempt.is_shared else deadline(limit_s):
            made = _made_ready(contender, how, attempt)
        attempt.passed("ready")
        return made
    except TimeIsUp:
        return attempt.failed(f"it was not ready after {limit_s:.0f} s and was given up")
    except Exception as error:  # compilers and peers raise what they like; the row says what it was
        if contender.is_required:
            raise
        if not isinstance(error, NotAvailable):
            _log.info("%s", contender.name, exc_info=error)
        return attempt.failed(sentence_of(error))


def _made_ready(contender: Contender, how: _How, attempt: Attempt) -> _Ready:
    on_cuda, rewind = how.on_cuda, how.rewind
    wait: Callable[[], object] = torch.cuda.synchronize if on_cuda else nothing
    before = device_memory.held_bytes(on_cuda=on_cuda)
    rewind()
    with inductor.empty_compile_caches() if contender.is_compiled else nullcontext():
        wait()
        started = time.perf_counter()
        makes_together = contender.make_on_ranks if attempt.is_shared else None
        with attempt.limited():
            call = contender.make() if makes_together is None else makes_together(attempt)
        attempt.passed("made the call")
        call()
        wait()
        taken_s = time.perf_counter() - started
        for _ in range(_WARM[on_cuda]):
            rewind()
            call()
    kept_bytes = device_memory.held_bytes(on_cuda=on_cuda) - before + contender.held_bytes
    rewind()
    peak = how.needed_bytes + kept_bytes + device_memory.transient_bytes(call, on_cuda=on_cuda)
    step = contender.step
    if step is None:
        trace = profiler.record(call, steps=how.traced_steps, on_cuda=on_cuda, before=rewind)
        launches = median_step(trace, on_cuda=on_cuda).launches
        step = step_profile.step_profile(contender.name, step_profile.classed_by_name(launches))
    larger = None if how.watch is None else how.watch.larger(call)
    if larger is not None:
        larger()
    larger_bytes = 0 if larger is None else device_memory.transient_bytes(larger, on_cuda=on_cuda)
    made = _Ready(
        contender=contender, call=call, step=replace(step, peak_memory_bytes=peak if on_cuda else 0),
        first_call_s=round(taken_s, 3), larger=larger,
        larger_peak_bytes=how.needed_bytes + kept_bytes + larger_bytes if larger is not None and on_cuda else 0,
    )  # fmt: skip
    return made if contender.is_required else _checked(made, how)


def named(rows: Sequence[Baseline], name: str) -> Baseline:
    """Return the row of a name."""
    return next(row for row in rows if row.name == name)
