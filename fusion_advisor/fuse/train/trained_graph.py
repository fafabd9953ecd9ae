"""A graph of dynamo's that trains: both passes rewritten at its first call, and kept where the whole step gains by it.

Both passes are AOTAutograd's graphs. Each is optimised like a graph that only infers, on the tensors of one step with random
gradients of its outputs. Then the step with both is compared with the graph's own ops under autograd: outputs and all gradients
against fp64, and the time of forward and backward together. A step that is not right or not faster runs the graph's own ops.

Attention's masks that say no more than a flag are flags from the start (``flag_trial``): both passes are traced without them.
Losses whose logits nobody else reads are computed in chunks (``fuse.loss``), in a graph of their own with two passes of its
own. Figures of an H200: ``docs/measurements/training_steps.md``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from fusion_advisor.capture.graph.side_effects import Numbers
from fusion_advisor.fuse.cuda_graph.recording import CudaRecorder, Recorder
from fusion_advisor.fuse.loss.budget import row_of_budget
from fusion_advisor.fuse.loss.recompute_options import RECOMPUTE_OPTIONS, RecomputeOption
from fusion_advisor.fuse.loss.record import LossPlan
from fusion_advisor.fuse.passes.cuda_graph import CUDA_GRAPH
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.rewrite.device_memory import transient_bytes
from fusion_advisor.fuse.step_graph.step_clock import StepClock
from fusion_advisor.fuse.step_graph.step_graph import StepGraph
from fusion_advisor.fuse.step_graph.trial import try_step_graph
from fusion_advisor.fuse.train.flag_trial import FlaggedGraph
from fusion_advisor.fuse.train.judge.gradients import check_gradients
from fusion_advisor.fuse.train.judge.loss_verdict import NO_MEMORY, LossTrial
from fusion_advisor.fuse.train.judge.recompute_choice import RecomputeChoice, StepPeaks, copied_out_bytes
from fusion_advisor.fuse.train.judge.recompute_verdict import RecomputeTrial
from fusion_advisor.fuse.train.judge.step_comparison import StepComparison, is_on_cuda
from fusion_advisor.fuse.train.passes.both_passes import BothPasses, FailsAsTraced, Half
from fusion_advisor.fuse.train.passes.loss_alone import LEAST_BYTES
from fusion_advisor.fuse.train.passes.recomputed import recomputed
from fusion_advisor.records import Capture, GraphRewrite, ModelCheck, Recomputed, Status
from fusion_advisor.runtime.torch_internals import autograd_graphs, dispatcher
from fusion_advisor.timing.host_timer import HostTimer
from fusion_advisor.timing.paired import Comparison

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a graph that trains.

    Attributes:
        reason: why it runs its own ops; empty where both passes run as they were rewritten.
        check: of its outputs and gradients; None where nothing was rewritten or the check could not be made.
        step_rows: of rewrites of the whole step: its losses where they have large logits, attention's masks where one was tried
            as a flag, its memory budget where there is one, its CUDA graphs where they were tried.
    """

    reason: str = ""
    check: ModelCheck | None = None
    step_rows: tuple[GraphRewrite, ...] = ()


NOTHING = "nothing was rewritten in either pass"
NOT_FASTER = "forward and backward together are not measurably faster with what was rewritten in both passes"
SLOWER = "forward and backward together are slower with the loss in chunks and what was rewritten in both passes"
_OPEN = ("", NOTHING, NOT_FASTER, SLOWER)
"""What is said of a step whose CUDA graphs may still be faster than the graph's own ops."""
SPARSE = "a gradient of it is sparse, and kernels write memory with strides"
OTHER_STAYS = "another option stays, and options are tried one by one"
WRITTEN_AGAIN = (
    "a checkpoint inside the model writes to a buffer, such as a batch norm's running mean: eager writes twice a step, and a "
    "traced graph once; fused is a step whose checkpoints leave such layers out"
)


class TrainedGraph:
    """Judges a graph with both passes rewritten at its first call, then stands for what is faster.

    Args:
        graph_module: dynamo's graph.
        inputs: its fake inputs.
        traced: the same in ATen ops that autograd differentiates; None where it cannot be traced so (under a checkpoint).
        names: of its inputs.
        options: of the run.
        half: makes a pass's call from its graph and its name, ``forward`` or ``backward``.
        unfused: warns with a reason and returns the call of the graph's own ops.
        timer: of steps; None: the one of the device.
        check: compares outputs and gradients.
        losses: what can be done to its losses; None where none has large logits.
        flagged: the graph after the trial of flags in place of masks, which ``losses`` are of too; None where there was none.
        compare: times two ways to run a step in turn; None: by ``timer``.
        make_recorder: of CUDA graphs; None: the device's own on a GPU, and no graphs elsewhere.
        peak: returns what a call allocates at its peak; None: by a GPU's allocator, and 0 elsewhere.
        eager_bytes: what the model's own step allocates at its peak; None: what the graph's own ops do. Those may hold far more:
            13.3 GB of BERT-large on an H200, where the model's step held 8.5.
        seconds: tells the time, for trials that may take no longer than the run allows.

    Attributes:
        outcome: known after the first call.
        step_graph: replays both passes where that pays; None where no graph was tried.
        left_out: passes that were rewritten too, and are not those of the step.
    """

    outcome: Outcome | None = None
    step_graph: StepGraph | None = None
    left_out: tuple[GraphModule, ...] = ()

    def __init__(
        self,
        graph_module: GraphModule,
        inputs: list[Any],
        *,
        traced: GraphModule | None,
        names: Callable[[tuple[Any, ...]], Sequence[str]],
        options: ApplyOptions,
        half: Callable[[GraphModule, str], Half],
        unfused: Callable[[str], Call],
        timer: HostTimer | None = None,
        check: Callable[..., ModelCheck] = check_gradients,
        losses: LossPlan | None = None,
        flagged: FlaggedGraph | None = None,
        compare: Callable[[Call, Call], Comparison] | None = None,
        make_recorder: Callable[[], Recorder] | None = None,
        peak: Callable[[Callable[[], Any]], int] | None = None,
        eager_bytes: int | None = None,
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._original, self._options = autograd_graphs.own_call(graph_module), options
        self._unfused, self._losses, self._make_recorder = unfused, losses, make_recorder
        self._peak, self._eager_bytes, self._seconds = peak, eager_bytes, seconds
        self._began_s = 0.0
        clock = StepClock(confidence=options.confidence, timer=timer, planted=compare)
        self._budget = options.memory_budget
        self._flag_rows = () if flagged is None else flagged.rows
        first = graph_module if flagged is None else flagged.module
        if losses is not None and losses.whole is not None:
            first = losses.whole
        least = LEAST_BYTES if options.is_timed else 0
        both = functools.partial(BothPasses, inputs=inputs, half=half, least_bytes=least)
        self._plain = self._passes = self._base = both(first)
        if self._budget < 1:
            self._passes = self._base = both(first, memory_budget=self._budget)
        put = losses.chunked if losses is not None else None
        self._chunked = None if put is None else both(put.module, memory_budget=self._budget)
        like: Callable[[Call], Call] = (lambda call: call) if put is None else put.like
        self._own = like(self._original)
        self._comparison = StepComparison(
            own=self._own, plain=self._plain, traced=traced, like=like, names=names, clock=clock, check=check
        )
        ways = [] if put is None or self._chunked is None else [(self._chunked, functools.partial(both, put.module))]
        self._again = self._recomputing([*ways, (self._base, functools.partial(both, first))])
        self._call: Call | None = None

    def _recomputing(self, ways: Sequence[tuple[BothPasses, Callable[..., BothPasses]]]) -> list[list[RecomputeTrial]]:
        """Return, for each option, trials with the loss in chunks and without. Their passes are traced when they are asked for.

        None under a budget, nor of a step that runs its own ops for its sparse gradients.

        Args:
            ways: the step without an option, and what makes it with one.
        """
        if self._budget < 1 or self._options.dry_run or self._plain.holds_sparse:
            return []
        trace = autograd_graphs.within_this_trace()

        def traced(both: Callable[..., BothPasses], option: RecomputeOption) -> BothPasses:
            with trace():
                return both(prepare=option.put)

        found = [
            [
                RecomputeTrial(option=option, whole=whole, make=functools.partial(traced, both, option))
                for whole, both in ways
                if len(whole.graphs) > 1 and option.is_in(whole.graphs["forward"])
            ]
            for option in RECOMPUTE_OPTIONS
            if self._options.wants(option.rewrite.id)
        ]
        return [trials for trials in found if trials]

    @property
    def halves(self) -> list[Half]:
        """Both passes, in the order in which AOTAutograd hands them over."""
        return self._passes.halves

    def computed_again(self, capture_of: Callable[[GraphModule], Capture | None]) -> tuple[Recomputed, ...]:
        """Return what a memory budget has the backward pass compute again; nothing without one, or where the step does not stay.

        Args:
            capture_of: returns what was traced of a pass, by its graph; None where nothing was.
        """
        before, after = self._plain.graphs, self._base.graphs
        if self._budget >= 1 or not self.is_rewritten or min(len(before), len(after)) < 2:
            return ()
        return recomputed(before, after, capture_of(self._passes.graphs["forward"]))

    @property
    def _joint(self) -> Call:
        return self._passes.call

    @property
    def is_rewritten(self) -> bool:
        """Whether both passes run as they were rewritten."""
        return self.outcome is not None and not self.outcome.reason

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        if self._call is None:
            numbers = Numbers.now()  # the step itself draws what it would have drawn without the runs that are timed
            try:
                with dispatcher.without_saved_hooks():
                    self.outcome = self._judged(args)
            except torch.cuda.OutOfMemoryError:
                self.outcome = Outcome(NO_MEMORY, step_rows=self._flag_rows)
            except FailsAsTraced as fails:
                self.outcome = Outcome(str(fails), step_rows=self._flag_rows)
            finally:
                numbers.restore()
            self._call = self._chosen(self.outcome)
            self._chunked, self._again = None, []
        return self._call(*args)

    def _chosen(self, outcome: Outcome) -> Call:
        """Return what runs from now on; that a graph has nothing to gain is no news."""
        if not outcome.reason:
            return self._joint
        is_news = outcome.reason not in (NOTHING, NOT_FASTER, SLOWER)
        return self._unfused(outcome.reason) if is_news else self._original

    def _judged(self, args: tuple[Any, ...]) -> Outcome:
        """Choose how losses are computed, optimise both passes and compare; then try them as CUDA graphs."""
        if self._plain.holds_sparse:
            return Outcome(SPARSE, step_rows=self._flag_rows)
        if self._plain.writes_in_checkpoint:
            return Outcome(WRITTEN_AGAIN, step_rows=self._flag_rows)
        make = self._make_recorder or (CudaRecorder if is_on_cuda(args) else None)
        is_wanted = self._options.graph and self._options.wants(CUDA_GRAPH.id) and self._budget >= 1
        if not is_wanted or self._options.dry_run or len(self._passes.by_name) < 2:
            make = None
        outcome = self._with_recomputing(self._judged_launches(args), args, in_graphs=make is not None)
        return outcome if make is None or outcome.reason not in _OPEN else self._with_graphs(outcome, args, make)

    def _with_graphs(self, outcome: Outcome, args: tuple[Any, ...], make: Callable[[], Recorder]) -> Outcome:
        """Try both passes as CUDA graphs. Where nothing else pays, they have to beat the model's own ops."""
        step, comparison = self._comparison.step(args), self._comparison
        graphs = self.step_graph = StepGraph(self._passes.by_name["forward"], self._passes.by_name["backward"], make)
        checks = [outcome.check]

        def numbers() -> str:
            if checks[0] is not None and comparison.has_same_bits(step, self._joint, graphs):
                return ""
            reason, checks[0] = comparison.checked(step, self._joint)
            return reason

        row = try_step_graph(
            graphs, lambda: step.run(self._joint), lambda: step.run(self._joint if not outcome.reason else self._own),
            numbers=numbers,
            compare=None if not self._options.is_timed else functools.partial(
                comparison.clock.compared_by_wall, on_cuda=is_on_cuda(args)
            ),
        )  # fmt: skip
        rows = (*outcome.step_rows, row)
        if row.status is Status.KEPT:
            return Outcome("", checks[0], rows)
        return replace(outcome, step_rows=rows)

    def _judged_launches(self, args: tuple[Any, ...]) -> Outcome:
        """Choose how losses are computed, optimise both passes and compare."""
        row, comparison, trial = self._losses.row if self._losses is not None else None, self._comparison, None
        if self._chunked is not None and row is not None:
            trial = LossTrial(whole=self._base, chunked=self._chunked, comparison=comparison, options=self._options)
            row = trial.alone(row, args)
            self._passes = trial.chunked if row.status is Status.KEPT else trial.whole
        rows = self._flag_rows if row is None else (row, *self._flag_rows)
        if self._budget < 1:
            peaks = self._plain.peak_bytes(lambda _: 0), self._base.peak_bytes(lambda _: 0)
            rows = (*rows, row_of_budget(self._budget, *peaks))
            if rows[-1].status is not Status.KEPT and self._passes is self._base:
                self._passes = self._base = self._plain
        step = comparison.step(args)
        self._began_s = self._seconds()
        self._passes.optimise(lambda: step.run(self._joint))
        if trial is not None and row is not None and row.status is Status.SLOWER:
            fused = trial.with_kernels(row, args)
            if fused is not None:
                row, rows = fused, (fused, *rows[1:])
                self._passes = trial.chunked if fused.status is Status.KEPT else trial.whole
                self.left_out += trial.left_out(fused)
        is_lighter = any(one.status is Status.KEPT for one in rows)
        if not is_lighter and not any(half.is_changed for half in self.halves):
            return Outcome(NOTHING, step_rows=rows)
        reason, found = comparison.checked(step, self._joint)
        pays_with_time = self._budget < 1 and is_lighter  # whoever asks for a budget does
        if reason or not self._options.is_timed or pays_with_time:
            return Outcome(reason, found, rows)
        change = comparison.timed(step, self._own, self._joint)
        if row is not None and row.status is Status.KEPT:  # it stays for its memory, unless that costs time
            return Outcome(SLOWER if change.low_ns > 0 else "", found, rows)
        return Outcome(NOT_FASTER if change.high_ns >= 0 else "", found, rows)

    def _with_recomputing(self, outcome: Outcome, args: tuple[Any, ...], *, in_graphs: bool) -> Outcome:
        """Add a row for each option of what is computed again; where the step may stay, they are timed and may stay too.

        A step that waits for Python may be no faster as long as it is launched kernel by kernel. Then its graphs decide.
        """
        if not self._again:
            return outcome
        may_stay = not outcome.reason or (in_graphs and outcome.reason in _OPEN)
        choice = self._choice(args, in_graphs=in_graphs) if self._options.is_timed and may_stay else None
        for trials in self._again:
            trial = next((one for one in trials if one.whole is self._passes), None)
            why_not = _untimed(may_stay) if choice is None else OTHER_STAYS if trial is None else choice.why_not()
            if why_not or choice is None or trial is None:
                row = trials[0].untraced_row(why_not)
            elif not (row := trial.row()).sites:
                continue
            elif row.saved_bytes:
                row, found = trial.timed(
                    row, self._comparison, args, most_share=choice.most_share(row.saved_bytes), why=choice.why()
                )
                is_kept = row.status is Status.KEPT
                self.left_out += tuple(half.graph for half in (trial.whole if is_kept else trial.passes).halves)
                if is_kept:
                    self._passes, outcome = trial.passes, replace(outcome, check=found)
            outcome = replace(outcome, step_rows=(*outcome.step_rows, row))
        return outcome

    def _choice(self, args: tuple[Any, ...], *, in_graphs: bool) -> RecomputeChoice:
        """Measure what decides which options are tried: the step's peak and eager's, and the time that is left."""
        step, now, graphs = self._comparison.step(args), self._seconds(), self._passes.graphs
        peak = self._peak or functools.partial(transient_bytes, on_cuda=is_on_cuda(args))
        eager = peak(functools.partial(step.run, self._own)) if self._eager_bytes is None else self._eager_bytes
        ours = peak(functools.partial(step.run, self._joint))
        beside = copied_out_bytes(graphs) if in_graphs else 0
        return RecomputeChoice(
            options=self._options, peaks=StepPeaks(eager_bytes=eager, ours_bytes=ours + beside),
            each_s=now - self._began_s, end_s=now + self._options.budgets.recompute_s, clock=self._seconds,
        )  # fmt: skip


def _untimed(may_stay: bool) -> str:
    return "no time decides what stays" if may_stay else "the step runs its own ops"
