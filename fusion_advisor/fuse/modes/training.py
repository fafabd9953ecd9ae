"""``--phase train``: a training step timed and traced; nothing is fused, for the kernels here have no backward pass."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from fusion_advisor.capture.profile import named_range, numbered, seen_by_nsys, warm_up
from fusion_advisor.capture.trace import profiler
from fusion_advisor.capture.trace.attribute import median_step
from fusion_advisor.capture.training import TrainingStep, in_training, join_modules
from fusion_advisor.errors import AdvisorError, MissingKernels, NotTrainable, ProfilerAttached
from fusion_advisor.fuse.decide import step_profile
from fusion_advisor.fuse.pipeline import on_device
from fusion_advisor.fuse.plan.options import ProfileOptions
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.fuse.rewrite import device_memory
from fusion_advisor.records import Capture, DataQuality, Report
from fusion_advisor.runtime.environment import describe_environment, measure_bandwidth
from fusion_advisor.runtime.external_profiler import BASELINE_RANGE, attached_profiler, recorded_by
from fusion_advisor.timing import wall_timer
from fusion_advisor.timing.clock_sampler import watching
from fusion_advisor.workload.device import is_out_of_memory
from fusion_advisor.workload.load import LoadedWorkload
from fusion_advisor.workload.weights import seeded


def profile_training(loaded: LoadedWorkload, options: ProfileOptions, progress: Progress | None = None) -> tuple[Report, Capture]:
    """Profile forward, loss and backward of a model in ``train()`` mode; the model is afterwards as it was.

    Args:
        loaded: the model and its inputs.
        options: how to measure; what concerns chains has no effect.
        progress: told what goes on.

    Raises:
        NotTrainable: no output depends on a parameter, or the step raises.
        ProfilerAttached: nsys or ncu watches; the step was timed for it.
        OutOfMemory: with what to try instead.
    """
    progress = progress or Progress()
    clock = PhaseClock(progress)
    device = torch.device(loaded.record.device)
    with on_device(loaded, "running a training step"):
        with clock.phase("bandwidth"):
            environment = describe_environment(loaded.record.device)
            bandwidth = options.bandwidth or measure_bandwidth(loaded.record.device)
        on_cuda = environment.device_kind == "cuda"
        with clock.phase("profile"), seeded(loaded.request.seed, device), in_training(loaded.model):
            step = TrainingStep(loaded.model, loaded.args, loaded.kwargs, model_id=loaded.record.model_id)
            _first(step, loaded)
            with named_range("fa:warmup", is_on=options.nvtx):
                warm_up(step, options.warmup)
            tool = attached_profiler(os.environ) if on_cuda else ""
            with (
                named_range(BASELINE_RANGE, is_on=options.nvtx),
                watching(on_cuda=on_cuda and not tool) as watch,
                seen_by_nsys(loaded.model, on_cuda=on_cuda, has_ranges=options.nvtx, is_recorded=options.nvtx or bool(tool)),
            ):

                def between(number: int, last_ns: int) -> None:
                    with named_range("fa:clocks", is_on=options.nvtx):
                        watch.sample(number, 0, step, last_ns)

                times = wall_timer.wall_times(
                    numbered(step) if options.nvtx else step,
                    runs=options.runs,
                    budget_s=options.budgets.wall_s,
                    least_s=options.min_time_s,
                    on_cuda=on_cuda,
                    warmup=0,
                    after=between,
                )
            wall = wall_timer.as_timing(times, "wall", watch.clocks())
            progress.note(f"training step {wall.median_ns / 1e6:.2f} ms over {len(times)} runs, loss: {step.loss}")
            if tool:
                raise ProfilerAttached(tool=tool, recorded=recorded_by(tool, len(times), "training step"))
            with (
                named_range("fa:trace", is_on=options.nvtx),
                profiler.module_ranges(loaded.model, torch.profiler.record_function),
            ):
                save_to = options.run_dir / "trace.before.json.gz" if options.run_dir else None
                trace = profiler.record(step, steps=options.steps, on_cuda=on_cuda, save_to=save_to)
            traced = median_step(trace, on_cuda=on_cuda)
            if traced.calls and not traced.launches:
                known = "another profiler may hold the device's counters; then its own recording is whole"
                raise MissingKernels(kernels=0, launches=traced.calls, known=known)
            training = join_modules(trace, traced, step.loss)
            progress.note(f"{len(traced.launches)} kernels, {traced.calls} launches")
            loaded.model.zero_grad(set_to_none=True)  # each step makes its own: they are part of what it needs
            needed = device_memory.needed_bytes(loaded.model, loaded.args, loaded.kwargs)
            peak = needed + device_memory.transient_bytes(step, on_cuda=on_cuda) if on_cuda else 0
    named = sum(row.forward_ns + row.backward_ns for row in training.modules if row.path)
    warning = f"the trace has {len(traced.launches)} kernels for {traced.calls} launches: the profiler dropped some"
    quality = DataQuality(
        launches=traced.calls,
        kernels=len(traced.launches),
        joined_share=named / max(traced.device_ns, 1),
        eager_device_ns=traced.device_ns,
        captured_device_ns=0,
        reconciliation="eager alone, for a training step is not captured",
        warnings=(warning,) if traced.calls != len(traced.launches) else (),
    )
    for text in quality.warnings:
        progress.warn(text)
    capture = Capture(
        workload=loaded.record,
        environment=environment,
        ops=(),
        launches=(),
        eager_launches=traced.launches,
        eager_step=wall,
        bandwidth=bandwidth,
        quality=quality,
    )
    before = step_profile.step_profile("eager", traced.launches, wall=wall)
    report = Report(
        run_id=options.run_id,
        config_hash=options.config_hash,
        status="profiled",
        command=options.command,
        workload=loaded.record,
        environment=environment,
        quality=quality,
        bandwidth=bandwidth,
        before=replace(before, peak_memory_bytes=peak),
        captured=None,
        after=None,
        chains=(),
        answers=(),
        training=training,
        durations_s=tuple(clock.durations_s),
        notes=(
            "A step is the forward pass in train() mode, the loss and the backward pass; gradients are made anew in each, the "
            "optimizer is left out.",
            "Shares come from a traced run, every wall time from runs without a profiler.",
            "A kernel of the backward pass is joined to its module by the number that autograd gave the forward op.",
        ),
    )
    return report, capture


def _first(step: TrainingStep, loaded: LoadedWorkload) -> None:
    try:
        step()
    except AdvisorError:
        raise
    except Exception as error:  # the model's own code, and autograd's: it is reported, never swallowed
        if is_out_of_memory(error):
            raise
        lines = str(error).strip().splitlines() or ["no message"]
        raise NotTrainable(model_id=loaded.record.model_id, detail=f"{type(error).__name__}: {lines[0]}") from error
