"""``profile --phase train``: a training step timed and traced; nothing is fused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from fusion_advisor.capture.graph.side_effects import Before, Written, arguments_kept, tell_what_moves
from fusion_advisor.capture.step_memory import record_step_memory
from fusion_advisor.capture.trace import profiler
from fusion_advisor.capture.trace.attribute import Step
from fusion_advisor.capture.training import TrainingStep, in_training, join_modules, without_history
from fusion_advisor.capture.unchanged_step import UnchangedStep
from fusion_advisor.errors import AdvisorError, NotTrainable
from fusion_advisor.fuse.decide import step_profile
from fusion_advisor.fuse.pipeline import measurement_of, on_device
from fusion_advisor.fuse.plan.options import ProfileOptions
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.fuse.rewrite import device_memory
from fusion_advisor.fuse.train import step_parts
from fusion_advisor.fuse.train.step_flops import step_flops
from fusion_advisor.records import Bandwidth, Capture, DataQuality, Environment, Report, StepMemory, StepParts, Timing, Training
from fusion_advisor.runtime.environment import describe_environment, measure_bandwidth
from fusion_advisor.runtime.torch_internals import module_call
from fusion_advisor.timing.host_timer import WallTimer, step_timer
from fusion_advisor.workload.device import is_out_of_memory
from fusion_advisor.workload.load import LoadedWorkload
from fusion_advisor.workload.weights import seeded

NOTES = (
    "A step is the forward pass in train() mode, the loss and the backward pass, without the optimizer. Each step makes new "
    "gradients.",
    "Shares come from a traced run, every wall time from runs without a profiler.",
    "A kernel of the backward pass is joined to its module by the number that autograd gave the forward op.",
)


def profile_training(loaded: LoadedWorkload, options: ProfileOptions, progress: Progress | None = None) -> tuple[Report, Capture]:
    """Profile forward, loss and backward of a model in ``train()`` mode; the model is afterwards as it was.

    Args:
        loaded: the model and its inputs.
        options: how to measure; what concerns chains has no effect.
        progress: is given each phase and its results.

    Raises:
        NotTrainable: no output depends on a parameter, or the step raises.
        ProfilerAttached: nsys or ncu watches; the step was timed for it.
        OutOfMemory: with what to try instead.
    """
    progress = progress or Progress()
    clock = PhaseClock(progress, is_whole=True)
    with apart_from_caller(loaded) as own, on_device(own, "running a training step"):
        with clock.phase("bandwidth"):
            environment = describe_environment(own.record.device)
            bandwidth = options.bandwidth or measure_bandwidth(own.record.device)
        seed, device = own.request.seed, torch.device(own.record.device)
        with clock.phase("profile"), seeded(seed, device), in_training(own.model), ExitStack() as at_the_end:
            on_cuda = environment.device_kind == "cuda"
            measured = measure_training(own, options, progress, on_cuda=on_cuda, at_the_end=at_the_end)
    for text in quality_of(measured).warnings:
        progress.warn(text)
    capture = capture_of(loaded, environment, bandwidth, measured)
    return first_report(capture, measured, options, clock), capture


@contextmanager
def apart_from_caller(loaded: LoadedWorkload) -> Iterator[LoadedWorkload]:
    """Yield a workload whose steps leave the caller's inputs as they are: their numbers, gradients, graph and hooks.

    Args:
        loaded: the model and its inputs.
    """
    args, kwargs = without_history(loaded.model, loaded.args, loaded.kwargs)
    with arguments_kept(args, kwargs):
        yield replace(loaded, args=args, kwargs=dict(kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a training step showed.

    Attributes:
        wall: its wall time.
        traced: the median of the traced steps.
        training: time by module, forward and backward.
        peak_bytes: device memory that it needs at most; 0 on a CPU.
    """

    wall: Timing
    traced: Step
    training: Training
    peak_bytes: int


def measure_training(
    loaded: LoadedWorkload, options: ProfileOptions, progress: Progress, *, on_cuda: bool, at_the_end: ExitStack
) -> Measured:  # fmt: skip
    """Time and trace the training step of a model in ``train()`` mode.

    Args:
        loaded: the model and its inputs.
        options: how to measure.
        progress: is given the results.
        on_cuda: whether the model is on a GPU.
        at_the_end: puts back what every step sets in the modules anew (a count, a buffer that is replaced, a list that grows) and
            random generators that steps draw from: the model's own, Python's, numpy's.

    Raises:
        NotTrainable: no output depends on a parameter, or the step raises.
        ProfilerAttached: nsys or ncu watches; the step was timed for it.
    """
    own = module_call.original_call(loaded.model)
    call = TrainingStep(loaded.model, loaded.args, loaded.kwargs, model_id=loaded.record.model_id, call=own)
    state, moved = Before.of(loaded.model), Written()
    with _restored_on_error(state):
        _first(call, loaded)
        when = "in the second step, not in the first, "  # a buffer that holds on to the first one's graph
        tell_what_moves(moved, state, lambda: _first(call, loaded, when), loaded.model)
    at_the_end.callback(moved.restore)
    at_the_end.callback(state.restore_generators)
    step = UnchangedStep(title="training step", call=call, model=loaded.model, on_cuda=on_cuda)
    how = measurement_of(options)
    timed = step.time(how, WallTimer())
    progress.note(f"training step {timed.timing.median_ns / 1e6:.2f} ms over {timed.runs} runs, loss: {call.loss}")
    timed.refuse_profiler()
    trace, traced = step.trace(how)
    progress.note(f"{len(traced.launches)} kernels, {traced.calls} launches")
    training = replace(
        join_modules(trace, traced, call.loss),
        parts=_parts(loaded, options, call, own, on_cuda=on_cuda),
        memory=_memory(loaded, call, on_cuda=on_cuda),
    )
    loaded.model.zero_grad(set_to_none=True)  # each step makes its own: they are part of what it needs
    needed = device_memory.needed_bytes(loaded.model, loaded.args, loaded.kwargs)
    peak = needed + device_memory.transient_bytes(call, on_cuda=on_cuda) if on_cuda else 0
    return Measured(wall=timed.timing, traced=traced, training=training, peak_bytes=peak)


def _parts(
    loaded: LoadedWorkload, options: ProfileOptions, step: TrainingStep, own: Callable[..., object], *, on_cuda: bool
) -> StepParts:  # fmt: skip
    """Time the eager forward pass and an optimizer, and count what a step does."""
    how = clocked(options, on_cuda=on_cuda)
    optimizer, note = step_parts.time_optimizers(loaded.model.parameters(), how)
    tokens, word = step_parts.tokens_of(loaded.args, loaded.kwargs)
    ((forward_ns, backward_ns),) = step_parts.pass_times([own], loaded.args, loaded.kwargs, lambda _: step, how)
    return StepParts(
        forward_before_ns=forward_ns, backward_before_ns=backward_ns, method=how.timer.method, optimizer=optimizer,
        optimizer_note=note, tokens=tokens, token_word=word, flops=step_flops(step),
    )  # fmt: skip


def clocked(options: ProfileOptions, *, on_cuda: bool) -> step_parts.Clocked:
    """Return how the parts of a step are timed.

    Args:
        options: of the run.
        on_cuda: whether it is on a GPU.
    """
    budget_s = options.budgets.wall_s / 2
    return step_parts.Clocked(on_cuda=on_cuda, rounds=options.runs, budget_s=budget_s, timer=step_timer(on_cuda=on_cuda))


def _memory(loaded: LoadedWorkload, step: TrainingStep, *, on_cuda: bool) -> tuple[StepMemory, ...]:
    ranges = functools.partial(profiler.module_ranges, loaded.model, torch.profiler.record_function)
    found = record_step_memory(step, label="eager", on_cuda=on_cuda, ranges=ranges)
    return () if found is None else (found,)


def quality_of(measured: Measured) -> DataQuality:
    """Return what a training step's trace holds and lacks."""
    traced = measured.traced
    named = sum(row.forward_ns + row.backward_ns for row in measured.training.modules if row.path)
    warning = f"the trace has {len(traced.launches)} kernels for {traced.calls} launches: the profiler dropped some"
    return DataQuality(
        launches=traced.calls,
        kernels=len(traced.launches),
        joined_share=named / max(traced.device_ns, 1),
        eager_device_ns=traced.device_ns,
        captured_device_ns=0,
        reconciliation="eager alone, for a training step is not captured",
        warnings=(warning,) if traced.calls != len(traced.launches) else (),
    )


def first_report(capture: Capture, measured: Measured, options: ProfileOptions, clock: PhaseClock) -> Report:
    """Return the report of a step of which nothing was rewritten."""
    before = step_profile.step_profile("eager", measured.traced.launches, wall=measured.wall)
    return Report(
        run_id=options.run_id,
        folder=str(options.run_dir or ""),
        config_hash=options.config_hash,
        status="profiled",
        command=options.command,
        workload=capture.workload,
        environment=capture.environment,
        quality=capture.quality,
        bandwidth=capture.bandwidth,
        before=replace(before, peak_memory_bytes=measured.peak_bytes),
        captured=None,
        after=None,
        chains=(),
        answers=(),
        training=measured.training,
        findings=step_parts.optimizer_finding(
            measured.training.parts.optimizer if measured.training.parts else (), device_ns=before.device_ns, number=1
        ),
        durations_s=tuple(clock.durations_s),
        notes=NOTES,
    )


def capture_of(loaded: LoadedWorkload, environment: Environment, bandwidth: Bandwidth, measured: Measured) -> Capture:
    """Return the record of a training step: its kernels, and no ops, for the ops of a backward pass are autograd's own."""
    return Capture(
        workload=loaded.record,
        environment=environment,
        ops=(),
        launches=(),
        eager_launches=measured.traced.launches,
        eager_step=measured.wall,
        bandwidth=bandwidth,
        quality=quality_of(measured),
    )


@contextmanager
def _restored_on_error(state: Before) -> Iterator[None]:
    """Put modules back as they were where a step raises."""
    try:
        yield
    except BaseException:
        state.restore()
        raise


def _first(step: TrainingStep, loaded: LoadedWorkload, when: str = "") -> None:
    try:
        step()
    except AdvisorError:
        raise
    except Exception as error:  # the model's own code, and autograd's: it is reported, never swallowed
        if is_out_of_memory(error):
            raise
        lines = str(error).strip().splitlines() or ["no message"]
        raise NotTrainable(model_id=loaded.record.model_id, detail=f"{when}{type(error).__name__}: {lines[0]}") from error
