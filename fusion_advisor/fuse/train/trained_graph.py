"""A graph of dynamo's that trains: both passes rewritten at its first call, and kept where the whole step gains by it.

Both passes are AOTAutograd's graphs. Each is optimised like a graph that only infers, on the tensors of one step with random
gradients of its outputs. Then the step with both is compared with the graph's own ops under autograd: outputs and all gradients
against fp64, and the time of forward and backward together. A step that is not right or not faster runs the graph's own ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from fusion_advisor.capture.graph.side_effects import Numbers
from fusion_advisor.fuse.live.model_check import Wide
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.train.gradients import LostGradient, Rows, TrainingStep, WideWithSameNumbers, check_gradients
from fusion_advisor.records import ModelCheck
from fusion_advisor.runtime.torch_internals import autograd_graphs
from fusion_advisor.timing.host_timer import HostTimer, step_timer
from fusion_advisor.timing.interleaving import interleave
from fusion_advisor.timing.paired import Comparison, compare_rounds

_ROUNDS, _BUDGET_S = 40, 3.0
_SEED = 1

Call = Callable[..., Any]


class Half(Protocol):
    """One of the two passes.

    Attributes:
        instead: where it is set, what runs in its place.
    """

    instead: Call | None

    @property
    def graph(self) -> GraphModule:
        """As AOTAutograd made it."""

    @property
    def is_changed(self) -> bool:
        """Whether something was rewritten."""

    def optimise(self, args: tuple[Any, ...]) -> Call:
        """Rewrite it, by the tensors of a call."""

    def __call__(self, *args: Any) -> Any:
        """Run it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a graph that trains.

    Attributes:
        reason: why it runs its own ops; empty where both passes run as they were rewritten.
        check: of its outputs and gradients; None where nothing was rewritten or the check could not be made.
    """

    reason: str = ""
    check: ModelCheck | None = None


NOTHING = "nothing was rewritten in either pass"
NOT_FASTER = "forward and backward together are not measurably faster with what was rewritten in both passes"
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

    Attributes:
        outcome: known after the first call.
    """

    outcome: Outcome | None = None

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
    ) -> None:
        self._original, self._traced, self._names, self._options = graph_module, traced, names, options
        self._unfused, self._timer, self._check = unfused, timer, check
        self.halves: list[Half] = []
        """Both passes, in the order in which AOTAutograd hands them over."""
        self._joint = autograd_graphs.with_backward(
            graph_module, inputs, self._taken(half, "forward"), self._taken(half, "backward")
        )
        self._call: Call | None = None

    def _taken(self, make: Callable[[GraphModule, str], Half], training_pass: str) -> Callable[[GraphModule], Half]:
        def taken(graph_module: GraphModule) -> Half:
            self.halves.append(make(graph_module, training_pass))
            return self.halves[-1]

        return taken

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
                self.outcome = Outcome(_NO_MEMORY)
            finally:
                numbers.restore()
            self._call = self._chosen(self.outcome)
        return self._call(*args)

    def _chosen(self, outcome: Outcome) -> Call:
        """Return what runs from now on; that a graph has nothing to gain is no news."""
        if not outcome.reason:
            return self._joint
        return self._original.forward if outcome.reason in (NOTHING, NOT_FASTER) else self._unfused(outcome.reason)

    def _judged(self, args: tuple[Any, ...]) -> Outcome:
        """Optimise both passes and compare."""
        original: Call = self._original.forward
        step = TrainingStep.of(original, self._names(args), args)
        self._optimise_halves(step)
        if not any(half.is_changed for half in self.halves):
            return Outcome(NOTHING)
        # Once with other numbers: a mask kept from the first call would be right for that call alone. And a second backward
        # pass over what is kept: one that writes to it is right once.
        step.run(self._joint, seed=_SEED + 1)
        ours = step.run(self._joint, seed=_SEED, backward_passes=2)
        if any(autograd_graphs.draws_numbers(half.graph) for half in self.halves):
            # Eager's dropout may draw other numbers from the same seed than the one op that it is traced as.
            theirs, wide = self._run_instead(step, lambda half: half.forward), self._wide_halves
        else:
            theirs, wide = step.run(original, seed=_SEED), self._wide_halves if self._traced is None else self._wide
        try:
            found = self._check(ours, theirs, functools.partial(wide, step))
        except LostGradient as lost:
            return Outcome(f"the step's gradients are others than the graph's own: {lost}")
        if not found.is_passed:
            return Outcome(
                f"the step's outputs and gradients are too far from {found.oracle}: relative error {found.fused_rel_l2:.2e}, "
                f"eager's own {found.eager_rel_l2:.2e}; the limit is: {found.limit}",
                found,
            )
        if self._options.is_timed and self._compared(step).high_ns >= 0:
            return Outcome(NOT_FASTER, found)
        return Outcome(check=found)

    def _optimise_halves(self, step: TrainingStep) -> None:
        """Rewrite both passes on what one step gives them.

        Not in the step: autograd runs the backward pass of a GPU in a thread of its own, which nothing should be profiled in.
        """
        given: list[tuple[Half, tuple[Any, ...]]] = []

        def noting(half: Half) -> Call:
            def run(*args: Any) -> Any:
                given.append((half, args))
                return half.graph(*args)

            return run

        for half in self.halves:
            half.instead = noting(half)
        try:
            step.run(self._joint)
        finally:
            for half in self.halves:
                half.instead = None
        with torch.no_grad():
            while given:
                half, args = given.pop(0)
                half.optimise(args)

    def _wide(self, step: TrainingStep) -> Rows:
        """Run the ops as the model calls them in fp64."""
        assert self._traced is not None
        return step.run(Wide(self._traced).run, is_wide=True, seed=_SEED)

    def _wide_halves(self, step: TrainingStep) -> Rows:
        """Run both passes as they were traced in fp64, with the random numbers that the narrow ops draw."""
        return self._run_instead(step, lambda graph: WideWithSameNumbers(graph).run, is_wide=True)

    def _run_instead(self, step: TrainingStep, instead: Callable[[GraphModule], Call], *, is_wide: bool = False) -> Rows:
        for half in self.halves:
            half.instead = instead(half.graph)
        try:
            return step.run(self._joint, is_wide=is_wide, seed=_SEED)
        finally:
            for half in self.halves:
                half.instead = None

    def _compared(self, step: TrainingStep) -> Comparison:
        on_cuda = any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in step.args)
        before, after = interleave(
            [lambda: step.run(self._original.forward), lambda: step.run(self._joint)],
            rounds=_ROUNDS, budget_s=_BUDGET_S, on_cuda=on_cuda, timer=self._timer or step_timer(on_cuda=on_cuda),
        )  # fmt: skip
        return compare_rounds(before, after, self._options.confidence)
