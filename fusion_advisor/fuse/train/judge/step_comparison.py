"""Compares ways to run a training step with the graph's own ops: outputs and gradients beside a wider dtype, and the time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from fusion_advisor.capture.graph.fx_nodes import written_inputs
from fusion_advisor.fuse.rewrite.device_memory import release_cached_memory
from fusion_advisor.fuse.step_graph.step_clock import StepClock
from fusion_advisor.fuse.step_graph.step_graph import StepGraph
from fusion_advisor.fuse.train.judge.gradients import LostGradient, Rows, TrainingStep, wide_run
from fusion_advisor.fuse.train.passes.both_passes import BothPasses
from fusion_advisor.records import ModelCheck
from fusion_advisor.runtime.torch_internals import fake_mode
from fusion_advisor.timing.paired import Comparison

Call = Callable[..., Any]

_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """What ways to run a step are compared with.

    Attributes:
        own: the graph's own ops under autograd.
        plain: both passes of the graph as they were traced.
        traced: the graph in ATen ops that autograd differentiates; None where it cannot be traced so (under a checkpoint).
        like: makes a call return None for logits that nobody is given.
        names: of the inputs of a call.
        clock: times steps.
        check: compares outputs and gradients.
    """

    own: Call
    plain: BothPasses
    traced: GraphModule | None
    like: Callable[[Call], Call]
    names: Callable[[tuple[Any, ...]], Sequence[str]]
    clock: StepClock
    check: Callable[..., ModelCheck]

    def step(self, args: tuple[Any, ...]) -> TrainingStep:
        """Return the step of a call.

        Args:
            args: the tensors of the call.
        """
        written = fake_mode.written_arguments(self.own, args) if self.traced is None else written_inputs(self.traced)
        return TrainingStep.of(self.own, self.names(args), args, self.plain.unasked, written)

    def checked(self, step: TrainingStep, joint: Call) -> tuple[str, ModelCheck | None]:
        """Compare a way to run a step with the graph's own ops.

        Args:
            step: what it is run on.
            joint: the way.

        Returns:
            Why it may not stay, empty where it may; and the check, where it could be made.
        """
        # Once with other numbers: a mask kept from the first call would be right for that call alone. And a second backward
        # pass over what is kept: one that writes to it is right once.
        step.run(joint, seed=_SEED + 1)
        ours = step.run(joint, seed=_SEED, backward_passes=2)
        if self.plain.draws_numbers:
            # Eager's dropout may draw other numbers from the same seed than the one op that it is traced as.
            theirs, wide = self._run_plain(step, lambda graph: graph.forward), self._wide_halves
        else:
            theirs, wide = step.run(self.own, seed=_SEED), self._wide_halves if self.traced is None else self._wide
        try:
            found = self.check(ours, theirs, functools.partial(wide, step))
        except LostGradient as lost:
            return f"the step's gradients are others than the graph's own: {lost}", None
        if found.is_passed:
            return "", found
        return (
            f"the step's outputs and gradients are too far from {found.oracle}: relative error {found.fused_rel_l2:.2e}, "
            f"eager's own {found.eager_rel_l2:.2e}; the limit is: {found.limit}"
        ), found

    def has_same_bits(self, step: TrainingStep, joint: Call, graphs: StepGraph) -> bool:
        """Whether replays give the bits of both passes launched kernel by kernel, which were checked; so in a second backward.

        Args:
            step: what both are run on.
            joint: both passes.
            graphs: of them.
        """
        step.run(joint, seed=_SEED + 1)
        replayed = step.run(joint, seed=_SEED, backward_passes=2)
        graphs.is_on = False
        launched = step.run(joint, seed=_SEED)
        graphs.is_on = True
        return [name for name, _ in replayed] == [name for name, _ in launched] and all(
            torch.equal(one, other) for (_, one), (_, other) in zip(replayed, launched, strict=True)
        )

    def timed(self, step: TrainingStep, before: Call, after: Call) -> Comparison:
        """Time two ways to run a step in turn.

        Args:
            step: what they are run on.
            before: one of them.
            after: the other.
        """
        return self.clock.compared(lambda: step.run(before), lambda: step.run(after), on_cuda=is_on_cuda(step.args))

    def _wide(self, step: TrainingStep, dtype: torch.dtype | None, rounds: int | None = None) -> Rows:
        """Run the ops as the model calls them in a wider dtype, or all but attention where that does not fit.

        In fp32 and fp64 a GPU runs attention by its formula, which keeps the scores of all layers for the backward pass.
        """
        assert self.traced is not None
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            return step.run(self.like(wide_run(self.traced, dtype, rounds)), wide=dtype, seed=_SEED)
        release_cached_memory()
        return self._wide_halves(step, dtype, rounds)

    def _wide_halves(self, step: TrainingStep, dtype: torch.dtype | None, rounds: int | None = None) -> Rows:
        """Run both passes as they were traced in a wider dtype, with the random numbers that the narrow ops draw."""
        return self._run_plain(step, lambda graph: wide_run(graph, dtype, rounds, has_same_numbers=True), dtype)

    def _run_plain(self, step: TrainingStep, instead: Callable[[GraphModule], Call], wide: torch.dtype | None = None) -> Rows:
        """Run both passes of the graph as dynamo captured it, with other calls in their place."""
        with self.plain.instead(instead):
            return step.run(self.plain.call, wide=wide, seed=_SEED)


def is_on_cuda(args: Sequence[Any]) -> bool:
    """Whether a tensor of a call lies on a GPU.

    Args:
        args: of the call.
    """
    return any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args)
