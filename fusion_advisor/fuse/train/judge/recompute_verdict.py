"""Judges options of what the backward pass computes again: what each spares, what it costs, and whether it stays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_advisor.fuse.loss.recompute_options import RecomputeOption, row_of_option, verdict_on_option
from fusion_advisor.fuse.loss.record import chunk_inside
from fusion_advisor.fuse.train.judge.loss_verdict import NO_MEMORY
from fusion_advisor.fuse.train.judge.step_comparison import StepComparison
from fusion_advisor.fuse.train.passes.both_passes import BothPasses
from fusion_advisor.fuse.train.passes.recomputed import kept_bytes
from fusion_advisor.records import GraphRewrite, ModelCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeTrial:
    """A step without an option and with it.

    Attributes:
        option: the option.
        whole: both passes without it.
        passes: both passes with it.
    """

    option: RecomputeOption
    whole: BothPasses
    passes: BothPasses

    def row(self) -> GraphRewrite:
        """Return the report's row of an option that was not timed."""
        before, after = (sum(kept_bytes(one.graphs).values()) for one in (self.whole, self.passes))
        peaks = self.whole.peak_bytes(chunk_inside), self.passes.peak_bytes(chunk_inside)
        return row_of_option(self.option, self.passes.sites, (before, after), peaks)

    def timed(
        self, row: GraphRewrite, comparison: StepComparison, args: tuple[Any, ...]
    ) -> tuple[GraphRewrite, ModelCheck | None]:  # fmt: skip
        """Time the step with the option against the step without, both with their kernels.

        Args:
            row: of :meth:`row`.
            comparison: with the graph's own ops.
            args: the tensors of a call.

        Returns:
            The row with its verdict, and the check of the step with the option, where it was made.
        """
        step, found = comparison.step(args), None
        try:
            self.passes.optimise(lambda: step.run(self.passes.call))
            change = comparison.timed(step, self.whole.call, self.passes.call)
            wrong, found = ("", None) if change.low_ns > 0 else comparison.checked(step, self.passes.call)
            row = verdict_on_option(row, wrong, change)
        except torch.cuda.OutOfMemoryError:
            row = replace(row, reason=f"{NO_MEMORY}; {row.reason}")
        return row, found
