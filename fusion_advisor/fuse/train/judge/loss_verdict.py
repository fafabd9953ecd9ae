"""Judges losses in chunks: by themselves first, and again with the kernels of both steps where they are slower so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from fusion_advisor.fuse.loss.record import chunk_inside, verdict_on_loss
from fusion_advisor.fuse.loss.unrolled import holds_unrolled
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.train.judge.step_comparison import StepComparison
from fusion_advisor.fuse.train.passes.both_passes import BothPasses, as_traced
from fusion_advisor.records import GraphRewrite, Status

NO_MEMORY = "no memory is left for a second step to compare with"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTrial:
    """A step with all logits at once, and the same with its losses in chunks.

    Attributes:
        whole: both passes with all logits.
        chunked: both passes without.
        comparison: with the graph's own ops.
        options: of the run.
    """

    whole: BothPasses
    chunked: BothPasses
    comparison: StepComparison
    options: ApplyOptions

    def alone(self, row: GraphRewrite, args: tuple[Any, ...]) -> GraphRewrite:
        """Return the verdict on the losses by themselves: nothing else is rewritten.

        Args:
            row: of the plan.
            args: the tensors of a call.
        """
        step, before, after = self.comparison.step(args), self.whole.call, self.chunked.call
        with self.whole.instead(as_traced), self.chunked.instead(as_traced):
            reason, _ = self.comparison.checked(step, after)
            is_timed = self.options.is_timed and self.options.memory_budget >= 1  # whoever asks for a budget pays in time
            change = None if reason or not is_timed else self.comparison.timed(step, before, after)
        return verdict_on_loss(row, reason, change, self._spared_bytes(), least_share=self.options.min_gain)

    def with_kernels(self, row: GraphRewrite, args: tuple[Any, ...]) -> GraphRewrite | None:
        """Return the verdict with the kernels that both steps get; None where no kernel joins the ops of a chunk.

        Op by op a chunk reads and writes nearly three times the bytes, and the step with all logits as many more. So which is
        faster that way says little of which is faster with kernels.

        Args:
            row: of the losses by themselves.
            args: the tensors of a call.
        """
        if not holds_unrolled(self.chunked.graphs):
            return None
        step = self.comparison.step(args)
        try:
            self.chunked.optimise(lambda: step.run(self.chunked.call))
            reason, _ = self.comparison.checked(step, self.chunked.call)
            change = None if reason else self.comparison.timed(step, self.whole.call, self.chunked.call)
            return verdict_on_loss(
                row,
                reason,
                change,
                self._spared_bytes(),
                least_share=self.options.min_gain,
                words=" with the kernels of both steps",
            )
        except torch.cuda.OutOfMemoryError:
            return replace(row, reason=f"{row.reason}; {NO_MEMORY}")

    def left_out(self, row: GraphRewrite) -> tuple[GraphModule, ...]:
        """Return the passes that were rewritten and are none of the step's.

        Args:
            row: of :meth:`with_kernels`.
        """
        left = self.whole if row.status is Status.KEPT else self.chunked
        return tuple(half.graph for half in left.halves)

    def _spared_bytes(self) -> int:
        """Return how much less memory a step takes at its peak with its losses in chunks."""
        return self.whole.peak_bytes(lambda _: 0) - self.chunked.peak_bytes(chunk_inside)
