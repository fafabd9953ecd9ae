"""What the phases of the last stage hand on: the job, what was kept, the fused model, and the after side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fusion_advisor.capture.trace.attribute import Step
from fusion_advisor.fuse.cuda_graph.recording import CudaRecorder, Recorder
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.keep_rule import Decision
from fusion_advisor.fuse.decide.session import Bench, BuiltFusion, BuiltLinear, Variant
from fusion_advisor.fuse.live.cuda_graph_choice import choose_graph
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.model_check import check_whole_model
from fusion_advisor.fuse.live.restore_plan import measure_warm_up
from fusion_advisor.fuse.passes.registry import kept_ids
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.records import Baseline, Capture, GraphRewrite, ModelCheck, Report, Timing, WarmUp
from fusion_advisor.workload.load import LoadedWorkload


def graph_recorder(bench: Bench) -> Recorder | None:
    """Return what records CUDA graphs on the model's device; None on a CPU, which has none."""
    return CudaRecorder() if bench.on_cuda else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStage:
    """What checks the fused model and puts it into a CUDA graph; a test plants its own answers.

    Attributes:
        check_model: compares the whole model's numbers with the original's.
        check_part: compares them with a part of the rewrites, to find a guilty one.
        graph_recorder: what records CUDA graphs on the bench's device; None where there are none.
        choose_graph: decides whether the graph stays.
        meet: waits until all ranks took back a graph that they had launched in vain. It is given where they record together, so
            that a graph may hold collectives of NCCL.
        measure_warm_up: times a saved plan's first call.
    """

    check_model: Callable[..., ModelCheck] = check_whole_model
    check_part: Callable[..., ModelCheck] = check_whole_model
    graph_recorder: Callable[[Bench], Recorder | None] = graph_recorder
    choose_graph: Callable[..., GraphRewrite] = choose_graph
    measure_warm_up: Callable[..., WarmUp] = measure_warm_up
    meet: Callable[[], object] | None = None


LAST_STAGE = LastStage()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all phases of the last stage share."""

    loaded: LoadedWorkload
    capture: Capture
    bench: Bench
    options: ApplyOptions
    progress: Progress
    clock: PhaseClock
    on_report: Callable[[Report], object]
    original: Callable[..., Any]
    instruments: Instruments = MEASURED
    last: LastStage = LAST_STAGE

    def eager_call(self) -> Any:
        """Run the original model."""
        return self.original(*self.loaded.args, **self.loaded.kwargs)

    @property
    def with_peers(self) -> bool:
        """Whether other ways to run the step are measured."""
        asked = self.options.measures_compile
        return self.bench.on_cuda or bool(self.options.command) if asked is None else asked


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStep:
    """What was kept."""

    report: Report
    decision: Decision
    built: list[BuiltFusion]
    linears: tuple[BuiltLinear, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The fused model, not in place yet, and the report so far."""

    job: Job
    kept: KeptStep
    variant: Variant
    fused: FusedModel
    report: Report
    tries_graph: bool
    """Whether a CUDA graph is tried: it was asked for, and the device has some."""
    is_graphed: bool = False

    def fused_call(self) -> Any:
        """Run the fused model."""
        return self.fused.dispatch(*self.job.loaded.args, **self.job.loaded.kwargs)

    @property
    def has_rewrites(self) -> bool:
        """Whether anything but a CUDA graph was kept."""
        return bool(self.kept.built or self.kept.linears or kept_ids(self.kept.report.rewrites))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The after side."""

    check: ModelCheck
    after_step: Step
    baselines: tuple[Baseline, ...]
    warm_up: WarmUp | None
    warnings: tuple[str, ...]
    answer_s: float | None
    """Until ours was timed against eager."""
    overhead: Timing | None = None
    """Of the host, of a fused call without its graphs."""
