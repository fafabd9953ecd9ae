"""The runs of a training step that its report shows: times of all ways to run it, and a trace of the fused one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from fusion_advisor.capture.trace import profiler
from fusion_advisor.capture.trace.attribute import Step, median_step
from fusion_advisor.capture.training import TrainingStep
from fusion_advisor.fuse.baselines.contenders import Contender
from fusion_advisor.fuse.baselines.measure_contenders import measure_all
from fusion_advisor.fuse.baselines.training_peers import StepWatch, training_peers
from fusion_advisor.fuse.baselines.training_step import TrainingWay, copied_adamw
from fusion_advisor.fuse.decide import step_profile
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.fuse.rewrite.device_memory import needed_bytes
from fusion_advisor.fuse.train.journal import Entry
from fusion_advisor.fuse.train.trained_model import TrainedModel
from fusion_advisor.records import EAGER, OURS, Baseline, StepProfile
from fusion_advisor.units import duration
from fusion_advisor.workload.load import LoadedWorkload

UNCHANGED = "unchanged"
"""Label of the step after a run that kept nothing."""
_QUICK_S = 1.0
"""Seconds for each way to run the step, with ``--quick``."""

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """What all phases share."""

    loaded: LoadedWorkload
    options: ApplyOptions
    progress: Progress
    clock: PhaseClock
    instruments: Instruments
    on_cuda: bool
    optimise: Callable[..., Call]

    def step(self, call: Call) -> TrainingStep:
        """Return the training step with a call in place of the model's own."""
        loaded = self.loaded
        return TrainingStep(loaded.model, loaded.args, loaded.kwargs, model_id=loaded.record.model_id, call=call)

    def without_gradients_after(self, call: Call) -> TrainingWay:
        """Return the step for a clock: it leaves no gradients, so that each step allocates its own."""
        loaded = self.loaded
        return TrainingWay(
            model=loaded.model, args=loaded.args, kwargs=loaded.kwargs, forward=call, model_id=loaded.record.model_id
        )  # fmt: skip

    @property
    def with_peers(self) -> bool:
        """Whether other ways to run the step are measured."""
        asked = self.options.measures_compile
        return self.on_cuda or bool(self.options.command) if asked is None else asked


def modules_of(entry: Entry) -> list[GraphModule]:
    """Return the rewritten graph of an entry; none where its own ops run."""
    return [] if entry.variant is None else entry.variant.modules


def traced(job: TrainingJob, fused: TrainedModel, kept: list[Entry]) -> tuple[list[int], Step]:
    """Trace the fused step; on a CPU the rewritten graphs run op by op, for a fused kernel is no ATen op and leaves no event.

    Args:
        job: the run.
        fused: the model.
        kept: the graphs that were rewritten.

    Returns:
        How often a step runs each kept graph, and the median of the traced steps.
    """
    counts: Counter[int] = Counter()
    step = job.without_gradients_after(fused.compiled_call)

    @contextmanager
    def counted(*, is_op_by_op: bool) -> Iterator[None]:
        def runner(entry: Entry) -> Call:
            (module,) = modules_of(entry)
            call = step_profile.FusedRunner(module).run if is_op_by_op else module.forward

            def run(*args: Any) -> Any:
                counts[id(entry.graph)] += 1
                return call(*args)

            return run

        with fused.running({id(entry.graph): runner(entry) for entry in kept}):
            yield

    with counted(is_op_by_op=False):
        step()
    runs = [counts[id(entry.graph)] for entry in kept]
    save_to = job.options.run_dir / "trace.after.json.gz" if job.options.run_dir else None
    with counted(is_op_by_op=not job.on_cuda):
        step()  # the first one in a new way takes longer
        trace = profiler.record(step, steps=job.options.steps, on_cuda=job.on_cuda, save_to=save_to)
    return runs, median_step(trace, on_cuda=job.on_cuda)


def baselines_of(
    job: TrainingJob, fused: TrainedModel, after_step: Step | None, before: StepProfile,
    on_rows: Callable[[tuple[Baseline, ...], int], None],
) -> tuple[tuple[Baseline, ...], int]:  # fmt: skip
    """Time eager, ours where something of it stays, and the other ways where they are asked for, in turn.

    Args:
        job: the run.
        fused: the model.
        after_step: the fused step's trace; None where nothing stays.
        before: the eager step's.
        on_rows: given what is returned once eager and ours are timed, and again with each other way.

    Returns:
        The rows, and the bytes of AdamW's state; 0 where no step with it was timed.
    """
    loaded, options = job.loaded, job.options
    eager = job.without_gradients_after(fused.original_call)
    contenders = [Contender(name=EAGER, make=lambda: eager, step=before, is_required=True)]
    if after_step is not None:
        after = step_profile.step_profile("fused", after_step.launches)
        contenders.append(
            Contender(
                name=OURS, make=lambda: job.without_gradients_after(fused.compiled_call), step=after, is_required=True,
                note="first call: its graphs were rewritten before",
            )
        )  # fmt: skip
    budget_s = min(options.budgets.wall_s, _QUICK_S) if options.effort == "quick" else options.budgets.wall_s
    if job.with_peers:
        others = training_peers(
            loaded, job.without_gradients_after, on_cuda=job.on_cuda, max_autotune=options.max_autotune,
            limit_s=options.compile_limit_s,
        )  # fmt: skip
        # What a CPU has none of is told where it was asked for.
        contenders += [one for one in others if one.is_compiled or job.on_cuda or options.is_peer_asked_for]
    with job.clock.phase("baselines"):
        # A way holds what is allocated while it is made ready; memory of graphs that are there before would be nobody's.
        fused.forget_recorded()
        optimizer = copied_adamw(loaded.model, on_cuda=job.on_cuda)
        if isinstance(optimizer, str):
            job.progress.note(f"the step with its optimizer was not timed: {optimizer}")
        watch = StepWatch(eager, None if isinstance(optimizer, str) else optimizer)
        state_bytes = 0 if watch.optimizer is None else watch.optimizer.state_bytes

        def early(rows: tuple[Baseline, ...]) -> None:
            job.progress.note(_said(rows))
            on_rows(rows, state_bytes)

        rows = measure_all(
            contenders, needed_bytes=needed_bytes(loaded.model, loaded.args, loaded.kwargs), on_cuda=job.on_cuda,
            runs=options.runs, budget_s=budget_s,
            least_s=options.min_time_s, traced_steps=options.steps, instruments=job.instruments, progress=job.progress,
            on_required=early, watch=watch,
        )  # fmt: skip
    return rows, state_bytes


def _said(rows: tuple[Baseline, ...]) -> str:
    timed = [(row.name, row.step.wall.median_ns) for row in rows if row.step is not None and row.step.wall is not None]
    return ", ".join(f"{name} {duration(ns)}" for name, ns in timed)
