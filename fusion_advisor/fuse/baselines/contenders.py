"""What else the step could be run with: eager in a CUDA graph, torch.compile's modes, Liger.

Every contender is made ready by itself (its first call is timed), then all of them are timed from the host's side in one
interleaved run, called as their users call them. One that cannot be run stays in the table with the reason.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from fusion_advisor.capture.trace import profiler
from fusion_advisor.capture.trace.attribute import median_step
from fusion_advisor.fuse.baselines.attempt import Attempt
from fusion_advisor.fuse.baselines.failure import sentence_of
from fusion_advisor.fuse.baselines.inductor_hybrid import Compiler, compile_rest
from fusion_advisor.fuse.baselines.liger import NotAvailable, with_liger
from fusion_advisor.fuse.decide import step_profile
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.session import Bench, Variant
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.rewrite import device_memory
from fusion_advisor.records import COMPILED, OURS_COMPILED, Baseline, StepCheck, StepProfile, Timing
from fusion_advisor.runtime.gc_pause import old_objects_left_out
from fusion_advisor.runtime.torch_internals import aten_ops, cuda_state, dynamo, inductor
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.clock_sampler import is_at_power_limit
from fusion_advisor.timing.deadline import TimeIsUp, deadline
from fusion_advisor.timing.wall_timer import nothing
from fusion_advisor.workload.load import LoadedWorkload

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

_IN_GRAPH = "inputs are copied in, results stay in the graph's memory"

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to run the step.

    Attributes:
        name: as in the table.
        make: makes the call ready; with the call's first run it is what is timed as the first call.
        make_on_ranks: the same where several ranks run the step together; None: as for one.
        step: its kernels, where they are known; traced otherwise.
        held_bytes: what it holds between calls beyond what making it ready here takes.
        is_compiled: whether compilers' caches are emptied for it.
        is_required: whether the run ends if it cannot be run.
        limit_s: seconds after which it is given up; 0: some times what the slowest compiler took so far. None: it is waited for.
        note: what its figures hold for.
    """

    name: str
    make: Callable[[], Call]
    make_on_ranks: Callable[[Attempt], Call] | None = None
    step: StepProfile | None = None
    held_bytes: int = 0
    is_compiled: bool = False
    is_required: bool = False
    limit_s: float | None = None
    note: str = ""


class Watch(Protocol):
    """What a row holds besides the step's time, where the step is a training step."""

    def check(self, way: Call) -> StepCheck | None:
        """Compare what a way computes with what eager does."""
        ...

    def larger(self, way: Call) -> Call | None:
        """Return a step of which the way's is a part, to be timed beside it."""
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


def peers(
    loaded: LoadedWorkload, eager: Call, *, on_cuda: bool, max_autotune: bool, rewind: Callable[[], object]
) -> list[Contender]:
    """Return the other ways to run the step, eager left out.

    Args:
        loaded: the model and its inputs.
        eager: the original call.
        on_cuda: whether there are CUDA graphs, and Liger's kernels.
        max_autotune: torch.compile's slowest mode too.
        rewind: puts back what a step moves on.
    """

    def compiled(mode: str, attempt: Attempt | None = None) -> Call:
        if mode == "reduce-overhead" and not on_cuda:
            raise NotAvailable("it is the default mode in CUDA graphs, and a CPU has none")
        if attempt is None:
            call = dynamo.compiled_call(loaded.model, "inductor", mode=mode)
        else:
            call = dynamo.compiled_call(loaded.model, attempt.compiling(inductor.compiler_of(mode)))
        return lambda: call(*loaded.args, **loaded.kwargs)

    def graphed() -> Call:
        if not on_cuda:
            raise NotAvailable("a CPU has no CUDA graphs")
        return in_graph(eager, loaded, rewind)

    def liger() -> Call:
        if not on_cuda:
            raise NotAvailable("Liger's kernels run on CUDA only")
        return with_liger(loaded)

    modes = ["default", "reduce-overhead", *(["max-autotune"] if max_autotune else [])]
    return [
        Contender(name="eager + CUDA graph", make=graphed, note=_IN_GRAPH),
        *(
            Contender(
                name=f"{COMPILED}{mode}",
                make=functools.partial(compiled, mode),
                make_on_ranks=functools.partial(compiled, mode),
                is_compiled=on_cuda or mode != "reduce-overhead",
                note="first call with empty caches",
            )
            for mode in modes
        ),
        Contender(
            name="Liger",
            make=liger,
            note="its rotary embedding left out: kernels bench saw it end in an illegal memory access",
        ),
    ]


def ours_compiled(
    loaded: LoadedWorkload, bench: Bench, variant: Variant, *, is_graphed: bool, compiler: Compiler = inductor.compile_graph
) -> Contender:
    """Return ours with torch.compile for the rest.

    Args:
        loaded: the model and its inputs.
        bench: over the graphs that ``variant`` was built of.
        variant: what is kept.
        is_graphed: run it in a CUDA graph, as ours is.
        compiler: of the rest.
    """

    def make() -> Call:
        modules = compile_rest(bench.live.regions, variant.modules, compiler)
        model = FusedModel(loaded.model, bench.live.regions, modules, loaded.args, loaded.kwargs)

        def call() -> Any:
            result = model.dispatch(*loaded.args, **loaded.kwargs)
            if model.fallbacks:
                raise NotAvailable(f"it ran the original ops: {next(iter(model.fallbacks))}")
            return result

        if not is_graphed:
            return call
        call()
        return in_graph(call, loaded, bench.live.written.rewind)

    return Contender(name=OURS_COMPILED, make=make, is_compiled=True, limit_s=0.0, note=_IN_GRAPH if is_graphed else "")


def in_graph(call: Call, loaded: LoadedWorkload, rewind: Callable[[], object]) -> Call:
    """Record a call as ``torch.cuda.graph`` does it; the tensors that it passes are copied in before each replay.

    Raises:
        CannotRecord: with the driver's sentence.
    """
    static = [value for value in (*loaded.args, *loaded.kwargs.values()) if isinstance(value, torch.Tensor) and value.is_cuda]
    fresh = [value.clone() for value in static]
    replay = interleaving.recorded(call, before=rewind, around=cuda_state.own_gemm_workspace)
    return _InGraph(call, static, fresh, replay)


@dataclass(frozen=True, slots=True)
class _InGraph:
    """A recorded call; the call itself holds what the graph reads (constants of a compiled model, say)."""

    call: Call
    static: list[torch.Tensor]
    fresh: list[torch.Tensor]
    replay: Call

    def __call__(self) -> None:
        if self.static:
            aten_ops.copy_all(self.static, self.fresh)
        self.replay()


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
    instruments: Instruments = MEASURED,
    progress: Progress | None = None,
    on_required: Callable[[tuple[Baseline, ...]], object] = lambda _: None,
    watch: Watch | None = None,
) -> tuple[Baseline, ...]:
    """Make contenders ready one by one, then time all of them in turn.

    Those that the run needs come first and are timed by themselves before a compiler is started: compilers take minutes, and a
    run that is ended meanwhile has its own result by then.

    Args:
        contenders: in the table's order.
        needed_bytes: of weights and inputs, which each of them needs.
        on_cuda: wait for the device, and trace it.
        runs: rounds at most.
        budget_s: seconds for each contender.
        least_s: seconds for each contender at least, beyond ``runs``.
        traced_steps: how many steps are traced of those whose kernels are not known.
        rewind: called ahead of each run, untimed: it puts back what a step moves on.
        instruments: time the runs.
        progress: is given each contender's name and, where it cannot be run, the reason.
        on_required: given the rows of those that the run needs, where there are others; of a training step with each other too.
        watch: of a training step.
    """
    progress = progress or Progress()
    how = _How(needed_bytes, on_cuda, runs, budget_s, least_s, traced_steps, rewind, instruments, watch)
    # On ranks compilers come first: a step with collectives that a CUDA graph cannot hold may end the run.
    in_order = sorted(contenders, key=lambda one: (not one.is_required, instruments.exchange is not None and not one.is_compiled))
    failed: dict[str, Baseline] = {}
    ready: list[_Ready] = []
    # What each of them holds is asked for after a full collection, twice: 4 of them ahead of the answer.
    few_walked = old_objects_left_out() if on_cuda else nullcontext()
    with torch.no_grad(), dynamo.raise_recompile_limit(1024), few_walked:
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
            if watch is not None and not contender.is_required:
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
