"""An apply whose verdicts are remembered: the kept rewrites are built, checked and put in again, and the step is measured.

In: a decision of an earlier run on this machine. Out: a run whose step, numbers and other ways to run it were measured now, and
whose chains, traced eager step and verdicts come from the earlier run. Qwen2.5-7B 1 x 512 spends 41 s on verdicts (H200).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from fusion_advisor.capture.graph.side_effects import kept_as_it_is
from fusion_advisor.errors import PlanMismatch
from fusion_advisor.fuse import remembered
from fusion_advisor.fuse.advice import torch_settings
from fusion_advisor.fuse.after_side import measure_after
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.decide.keep_rule import Decision
from fusion_advisor.fuse.finish import MOST_SHAPES, AppliedRun, checked, concluded
from fusion_advisor.fuse.installed import Installed, Job, KeptStep, LastStage
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.restore_plan import Restored, put_together
from fusion_advisor.fuse.live.saved_plan import SavedPlan
from fusion_advisor.fuse.passes.cuda_graph import CUDA_GRAPH
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.fuse.start.record import write_start
from fusion_advisor.records import Environment, Report, WarmUp
from fusion_advisor.runtime.deep_stack import in_one_piece
from fusion_advisor.runtime.environment import content_digest, describe_environment
from fusion_advisor.runtime.gc_pause import collector_paused
from fusion_advisor.runtime.torch_internals import module_call
from fusion_advisor.workload.load import LoadedWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Where a run's decision is remembered."""

    key: str
    environment: Environment

    def keep(self, run: AppliedRun) -> None:
        """Remember what a run decided.

        Args:
            run: finished.
        """
        remembered.remember(self.key, run.capture, run.report)


def memory_of(loaded: LoadedWorkload, options: ApplyOptions) -> Memory | None:
    """Return where a run's decision is remembered; None where it is not asked for.

    Args:
        loaded: the model and its inputs.
        options: of the run.
    """
    if not remembered.is_wanted(options):
        return None
    environment = describe_environment(loaded.record.device)
    key = remembered.decision_key(loaded.record, environment, options, torch_settings(), content_digest())
    return Memory(key=key, environment=environment)


def apply_again(
    loaded: LoadedWorkload,
    memory: Memory,
    options: ApplyOptions,
    progress: Progress,
    clock: PhaseClock,
    on_report: Callable[[Report], object],
    *,
    instruments: Instruments,
    last: LastStage,
) -> AppliedRun | None:
    """Put in what an earlier run decided, and measure the step; None where there is no such run, or its decision holds no more.

    Args:
        loaded: the model and its inputs.
        memory: where the decision is looked up.
        options: of this run.
        progress: receives each result.
        clock: of the phases.
        on_report: given the report ahead of the minutes that other ways to run the step take.
        instruments: time the step after.
        last: checks the fused model and records its graph.
    """
    saved = remembered.find(memory.key, progress.warn)
    if saved is None:
        return None
    run_id = saved.report.run_id or "an earlier one"
    if options.run_dir is not None:
        saved = replace(saved, run_dir=options.run_dir)  # its kernels are written for this run to show
    with kept_as_it_is(loaded.model, loaded.args, loaded.kwargs):
        try:
            with collector_paused():
                restored = in_one_piece(lambda: put_together(loaded, saved, clock))
        except PlanMismatch as mismatch:
            return _drop(memory, progress, str(mismatch))
        try:
            progress.note(f"verdicts remembered from run {run_id}; --fresh times every rewrite again")
            installed = _installed(
                loaded, saved, restored, memory, options, progress, clock, on_report, instruments, last
            )  # fmt: skip
            check = checked(installed)
            if not check.is_passed:
                return _drop(memory, progress, "the whole model's numbers do not pass")
            run = concluded(installed, measure_after(installed, check))
            run.write_start = partial(write_start, loaded, restored.live)
        finally:
            restored.live.written.restore()
    return run if remembered.keeps_any(run.report) else _drop(memory, progress, "the step is slower than eager now")


def _drop(memory: Memory, progress: Progress, why: str) -> AppliedRun | None:
    """Forget a decision, so that this run and the next measure; there is no run to return."""
    remembered.forget(memory.key)
    progress.note(f"a remembered decision holds no more, so every rewrite is timed: {why}")
    return None


def _installed(
    loaded: LoadedWorkload,
    saved: SavedPlan,
    restored: Restored,
    memory: Memory,
    options: ApplyOptions,
    progress: Progress,
    clock: PhaseClock,
    on_report: Callable[[Report], object],
    instruments: Instruments,
    last: LastStage,
) -> Installed:
    """Return the fused model of a restored plan, with the earlier run's report under this run's name."""
    bench, old = restored.bench, saved.report
    assert old.step_before is not None and old.step_after is not None  # of a run that was timed
    decision = Decision(
        verdicts={}, noise_share=old.noise_share or 0.0, before=old.step_before, after=old.step_after,
        method=old.step_after.method, untouched_ns=old.step_before.median_ns,
    )  # fmt: skip
    report = replace(
        old, run_id=options.run_id, config_hash=options.config_hash, command=options.command, workload=loaded.record,
        folder=str(options.run_dir or ""),
        environment=memory.environment, after=None, baselines=(), model_check=None, gates=(), warnings=(),
        baseline=options.baseline, remembered_from=old.remembered_from or old.run_id or "an earlier run",
    )  # fmt: skip
    recorder = last.graph_recorder(bench) if CUDA_GRAPH.id in saved.rewrites else None
    graphs = None
    if recorder is not None:
        graphs = Graphs(recorder, limit=options.graphs, most_bytes=options.graph_bytes, outputs=options.graph_outputs)
    with clock.phase("install"):
        variant = restored.variant(saved)
        fused = FusedModel(
            loaded.model, bench.live.regions, variant.modules, loaded.args, loaded.kwargs, plan=restored.plan,
            graphs=graphs,
            on_first_use=MOST_SHAPES if options.dynamic == "on_first_use" else 0, live=restored.live,
        )  # fmt: skip
    if old.warm_up is not None:
        last = replace(last, measure_warm_up=_warm_up_of(old.warm_up))
    job = Job(
        loaded=loaded, capture=saved.capture, bench=bench, options=options, progress=progress, clock=clock, on_report=on_report,
        original=module_call.original_call(loaded.model), instruments=instruments, last=last,
    )  # fmt: skip
    kept = KeptStep(report=report, decision=decision, built=list(restored.plan.fusions), linears=tuple(restored.linears))
    return Installed(
        job=job, kept=kept, variant=variant, fused=fused, report=report, tries_graph=False, is_graphed=recorder is not None
    )


def _warm_up_of(found: WarmUp) -> Callable[..., WarmUp]:
    """Repeat the earlier run's figure: this run itself is such a start, with other phases between."""
    return lambda *_: found
