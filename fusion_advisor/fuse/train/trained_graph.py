"""A graph of dynamo's that trains: both passes rewritten at its first call, and kept where the whole step gains by it.

Both passes are AOTAutograd's graphs. Each is optimised like a graph that only infers, on the tensors of one step with random
gradients of its outputs. Then the step with both is compared with the graph's own ops under autograd: outputs and all gradients
against fp64, and the time of forward and backward together. A step that is not right or not faster runs the graph's own ops.

Attention's masks that say no more than a flag are flags from the start (``flag_trial``): both passes are traced without them.
Losses whose logits nobody else reads are computed in chunks (``fuse.loss``), in a graph of their own with two passes of its
own. Figures of an H200: ``docs/measurements/training_steps.md``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from fusion_advisor.capture.graph.side_effects import Numbers
from fusion_advisor.fuse.cuda_graph.recording import CudaRecorder, Recorder
from fusion_advisor.fuse.loss.budget import row_of_budget
from fusion_advisor.fuse.loss.recompute_options import RECOMPUTE_OPTIONS, RecomputeOption, row_of_option, verdict_on_option
from fusion_advisor.fuse.loss.record import LossPlan, chunk_inside, verdict_on_loss
from fusion_advisor.fuse.loss.unrolled import holds_unrolled
from fusion_advisor.fuse.passes.cuda_graph import CUDA_GRAPH
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.rewrite.device_memory import release_cached_memory
from fusion_advisor.fuse.step_graph.step_clock import StepClock
from fusion_advisor.fuse.step_graph.step_graph import StepGraph
from fusion_advisor.fuse.step_graph.trial import try_step_graph
from fusion_advisor.fuse.train.both_passes import BothPasses, Half
from fusion_advisor.fuse.train.flag_trial import FlaggedGraph
from fusion_advisor.fuse.train.gradients import LostGradient, Rows, TrainingStep, check_gradients, wide_run
from fusion_advisor.fuse.train.recomputed import kept_bytes, recomputed
from fusion_advisor.records import Capture, GraphRewrite, ModelCheck, Recomputed, Status
from fusion_advisor.timing.host_timer import HostTimer
from fusion_advisor.timing.paired import Comparison

_SEED = 1

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
_NO_MEMORY = "no memory is left for a second step to compare with"


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
    ) -> None:
        self._original, self._traced, self._names, self._options = graph_module, traced, names, options
        self._unfused, self._check, self._losses, self._make_recorder = unfused, check, losses, make_recorder
        self._clock = StepClock(confidence=options.confidence, timer=timer, planted=compare)
        self._budget = options.memory_budget
        self._flag_rows = () if flagged is None else flagged.rows
        first = graph_module if flagged is None else flagged.module
        self._plain = self._passes = self._base = BothPasses(first, inputs, half)
        if self._budget < 1:
            self._passes = self._base = BothPasses(first, inputs, half, self._budget)
        self._drops: Callable[[Call], Call] = lambda call: call
        """Makes a call that returns the logits return None in their place, where that is so of the passes in use."""
        self._chunked = BothPasses(losses.chunked.module, inputs, half, self._budget) if losses and losses.chunked else None
        chunked = losses.chunked.module if losses and losses.chunked else first
        self._again = self._recomputing(self._chunked or self._base, chunked, inputs, half)
        self._call: Call | None = None

    def _recomputing(
        self, whole: BothPasses, graph_module: GraphModule, inputs: list[Any], half: Callable[[GraphModule, str], Half]
    ) -> list[tuple[RecomputeOption, BothPasses, BothPasses]]:
        """Return the step without and with each option that has something to compute again; none under a budget."""
        if self._budget < 1 or self._options.dry_run or len(whole.graphs) < 2:
            return []
        options = [one for one in RECOMPUTE_OPTIONS if self._options.wants(one.rewrite.id) and one.is_in(whole.graphs["forward"])]
        found = [(one, whole, BothPasses(graph_module, inputs, half, prepare=one.put)) for one in options]
        return [one for one in found if one[2].sites]

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
                self.outcome = self._judged(args)
            except torch.cuda.OutOfMemoryError:
                self.outcome = Outcome(_NO_MEMORY, step_rows=self._flag_rows)
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
        return self._unfused(outcome.reason) if is_news else self._original.forward

    def _judged(self, args: tuple[Any, ...]) -> Outcome:
        """Choose how losses are computed, optimise both passes and compare; then try them as CUDA graphs."""
        outcome = self._with_recomputing(self._judged_launches(args), args)
        make = self._make_recorder or (CudaRecorder if _is_on_cuda(args) else None)
        is_wanted = self._options.graph and self._options.wants(CUDA_GRAPH.id) and self._budget >= 1
        if make is None or not is_wanted or self._options.dry_run or len(self._passes.by_name) < 2:
            return outcome
        return self._with_graphs(outcome, args, make) if outcome.reason in ("", NOTHING, NOT_FASTER) else outcome

    def _with_graphs(self, outcome: Outcome, args: tuple[Any, ...], make: Callable[[], Recorder]) -> Outcome:
        """Try both passes as CUDA graphs. Where nothing else pays, they have to beat the model's own ops."""
        step = TrainingStep.of(self._own, self._names(args), args)
        graphs = self.step_graph = StepGraph(self._passes.by_name["forward"], self._passes.by_name["backward"], make)
        checks = [outcome.check]

        def numbers() -> str:
            if checks[0] is not None and self._has_same_bits(graphs, step):
                return ""
            reason, checks[0] = self._checked(step)
            return reason

        row = try_step_graph(
            graphs, lambda: step.run(self._joint), lambda: step.run(self._joint if not outcome.reason else self._own),
            numbers=numbers,
            compare=None if not self._options.is_timed else functools.partial(
                self._clock.compared_by_wall, on_cuda=_is_on_cuda(args)
            ),
        )  # fmt: skip
        rows = (*outcome.step_rows, row)
        if row.status is Status.KEPT:
            return Outcome("", checks[0], rows)
        return replace(outcome, step_rows=rows)

    def _has_same_bits(self, graphs: StepGraph, step: TrainingStep) -> bool:
        """Whether replays give the bits of both passes launched kernel by kernel, which were checked; so in a second backward."""
        step.run(self._joint, seed=_SEED + 1)
        replayed = step.run(self._joint, seed=_SEED, backward_passes=2)
        graphs.is_on = False
        launched = step.run(self._joint, seed=_SEED)
        graphs.is_on = True
        return [name for name, _ in replayed] == [name for name, _ in launched] and all(
            torch.equal(one, other) for (_, one), (_, other) in zip(replayed, launched, strict=True)
        )

    def _judged_launches(self, args: tuple[Any, ...]) -> Outcome:
        """Choose how losses are computed, optimise both passes and compare."""
        row = self._losses.row if self._losses is not None else None
        if self._chunked is not None and row is not None:
            row = self._with_losses(row, args)
        is_chunked = row is not None and row.status is Status.KEPT
        rows = self._flag_rows if row is None else (row, *self._flag_rows)
        if self._budget < 1:
            peaks = self._plain.peak_bytes(lambda _: 0), self._base.peak_bytes(lambda _: 0)
            rows = (*rows, row_of_budget(self._budget, *peaks))
        step = TrainingStep.of(self._own, self._names(args), args)
        self._passes.optimise(lambda: step.run(self._joint))
        if row is not None and row.status is Status.SLOWER and (fused := self._with_fused_losses(row, args)) is not None:
            rows, is_chunked = (fused, *rows[1:]), fused.status is Status.KEPT
            step = TrainingStep.of(self._own, self._names(args), args)
        is_lighter = any(one.status is Status.KEPT for one in rows)
        if not is_lighter and not any(half.is_changed for half in self.halves):
            return Outcome(NOTHING, step_rows=rows)
        reason, found = self._checked(step)
        if reason or not self._options.is_timed or self._budget < 1:  # whoever asks for a budget pays for it with time
            return Outcome(reason, found, rows)
        change = self._compared(lambda: step.run(self._own), lambda: step.run(self._joint), step)
        if is_chunked:  # it stays for its memory, unless that costs time
            return Outcome(SLOWER if change.low_ns > 0 else "", found, rows)
        return Outcome(NOT_FASTER if change.high_ns >= 0 else "", found, rows)

    @property
    def _own(self) -> Call:
        """The graph's own ops."""
        return self._drops(self._original.forward)

    def _with_losses(self, row: GraphRewrite, args: tuple[Any, ...]) -> GraphRewrite:
        """Judge the losses in chunks by themselves: nothing else is rewritten. What passes is in use from then on."""
        assert self._chunked is not None and self._losses is not None and self._losses.chunked is not None
        self._drops = self._losses.chunked.like
        step = TrainingStep.of(self._own, self._names(args), args)
        before, after = self._drops(self._base.call), self._chunked.call
        with self._base.instead(lambda graph: graph.forward), self._chunked.instead(lambda graph: graph.forward):
            self._passes = self._chunked
            reason, _ = self._checked(step)
            is_timed = self._options.is_timed and self._budget >= 1  # whoever asks for a budget pays for it with time
            change = None if reason or not is_timed else self._compared(
                lambda: step.run(before), lambda: step.run(after), step
            )  # fmt: skip
        row = verdict_on_loss(row, reason, change, self._spared_bytes())
        if row.status is not Status.KEPT:
            self._passes, self._drops = self._base, lambda call: call
        return row

    def _with_fused_losses(self, row: GraphRewrite, args: tuple[Any, ...]) -> GraphRewrite | None:
        """Judge losses in chunks again, with the kernels that both steps get; None where no kernel joins the ops of a chunk.

        Op by op a chunk reads and writes nearly three times the bytes, and the step with all logits as many more. So which is
        faster that way says little of which is faster with kernels.
        """
        assert self._chunked is not None and self._losses is not None and self._losses.chunked is not None
        if not holds_unrolled(self._chunked.graphs):
            return None
        whole, self._passes, self._drops = self._passes, self._chunked, self._losses.chunked.like
        step = TrainingStep.of(self._own, self._names(args), args)
        try:
            self._passes.optimise(lambda: step.run(self._joint))
            reason, _ = self._checked(step)
            change = None if reason else self._compared(
                lambda: step.run(self._drops(whole.call)), lambda: step.run(self._joint), step
            )  # fmt: skip
            row = verdict_on_loss(row, reason, change, self._spared_bytes(), words=" with the kernels of both steps")
        except torch.cuda.OutOfMemoryError:
            row = replace(row, reason=f"{row.reason}; {_NO_MEMORY}")
        if row.status is not Status.KEPT:
            self._passes, self._drops = whole, lambda call: call
        left = whole if row.status is Status.KEPT else self._chunked
        self.left_out += tuple(half.graph for half in left.halves)
        return row

    def _with_recomputing(self, outcome: Outcome, args: tuple[Any, ...]) -> Outcome:
        """Add a row for each option of what is computed again; where the step was rewritten, they are timed and may stay."""
        for option, whole, passes in self._again:
            before, after = (sum(kept_bytes(one.graphs).values()) for one in (whole, passes))
            peaks = whole.peak_bytes(chunk_inside), passes.peak_bytes(chunk_inside)
            row, check = row_of_option(option, passes.sites, (before, after), peaks), outcome.check
            is_timed = self._options.is_timed and self._options.effort != "quick" and not outcome.reason
            if row.saved_bytes and is_timed and self._passes is whole:
                row, check = self._timed_option(row, passes, args, outcome.check)
            outcome = replace(outcome, check=check, step_rows=(*outcome.step_rows, row))
        return outcome

    def _timed_option(
        self, row: GraphRewrite, passes: BothPasses, args: tuple[Any, ...], check: ModelCheck | None
    ) -> tuple[GraphRewrite, ModelCheck | None]:
        """Time the step with an option against the step without, both with their kernels; it is in use afterwards if it stays."""
        whole, step = self._passes, TrainingStep.of(self._own, self._names(args), args)
        self._passes = passes
        try:
            passes.optimise(lambda: step.run(passes.call))
            change = self._compared(lambda: step.run(whole.call), lambda: step.run(passes.call), step)
            wrong, found = ("", None) if change.low_ns > 0 else self._checked(step)
            row = verdict_on_option(row, wrong, change)
        except torch.cuda.OutOfMemoryError:
            row = replace(row, reason=f"{_NO_MEMORY}; {row.reason}")
        is_kept = row.status is Status.KEPT
        if not is_kept:
            self._passes = whole
        self.left_out += tuple(half.graph for half in (whole if is_kept else passes).halves)
        return row, found if is_kept else check

    def _spared_bytes(self) -> int:
        """Return how much less memory a step takes at its peak with its losses in chunks."""
        assert self._chunked is not None
        return self._base.peak_bytes(lambda _: 0) - self._chunked.peak_bytes(chunk_inside)

    def _checked(self, step: TrainingStep) -> tuple[str, ModelCheck | None]:
        """Compare the passes in use with the graph's own ops.

        Returns:
            Why they may not stay, empty where they may; and the check, where it could be made.
        """
        # Once with other numbers: a mask kept from the first call would be right for that call alone. And a second backward
        # pass over what is kept: one that writes to it is right once.
        step.run(self._joint, seed=_SEED + 1)
        ours = step.run(self._joint, seed=_SEED, backward_passes=2)
        if self._plain.draws_numbers:
            # Eager's dropout may draw other numbers from the same seed than the one op that it is traced as.
            theirs, wide = self._run_plain(step, lambda graph: graph.forward), self._wide_halves
        else:
            theirs, wide = step.run(self._own, seed=_SEED), self._wide_halves if self._traced is None else self._wide
        try:
            found = self._check(ours, theirs, functools.partial(wide, step))
        except LostGradient as lost:
            return f"the step's gradients are others than the graph's own: {lost}", None
        if found.is_passed:
            return "", found
        return (
            f"the step's outputs and gradients are too far from {found.oracle}: relative error {found.fused_rel_l2:.2e}, "
            f"eager's own {found.eager_rel_l2:.2e}; the limit is: {found.limit}"
        ), found

    def _wide(self, step: TrainingStep, dtype: torch.dtype | None, rounds: int | None = None) -> Rows:
        """Run the ops as the model calls them in a wider dtype, or all but attention where that does not fit.

        In fp32 and fp64 a GPU runs attention by its formula, which keeps the scores of all layers for the backward pass.
        """
        assert self._traced is not None
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            return step.run(self._drops(wide_run(self._traced, dtype, rounds)), wide=dtype, seed=_SEED)
        release_cached_memory()
        return self._wide_halves(step, dtype, rounds)

    def _wide_halves(self, step: TrainingStep, dtype: torch.dtype | None, rounds: int | None = None) -> Rows:
        """Run both passes as they were traced in a wider dtype, with the random numbers that the narrow ops draw."""
        return self._run_plain(step, lambda graph: wide_run(graph, dtype, rounds, has_same_numbers=True), dtype)

    def _run_plain(self, step: TrainingStep, instead: Callable[[GraphModule], Call], wide: torch.dtype | None = None) -> Rows:
        """Run both passes of the graph as dynamo captured it, with other calls in their place."""
        with self._plain.instead(instead):
            return step.run(self._drops(self._plain.call), wide=wide, seed=_SEED)

    def _compared(self, before: Call, after: Call, step: TrainingStep) -> Comparison:
        """Time two ways to run a step in turn."""
        return self._clock.compared(before, after, on_cuda=_is_on_cuda(step.args))


def _is_on_cuda(args: Sequence[Any]) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args)
