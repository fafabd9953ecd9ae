"""Judges options of what the backward pass computes again: what each spares, what it costs, and whether it stays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_advisor.fuse.loss.recompute_options import RecomputeOption, is_too_slow, row_of_option, verdict_on_option
from fusion_advisor.fuse.loss.record import chunk_inside
from fusion_advisor.fuse.train.judge.loss_verdict import NO_MEMORY
from fusion_advisor.fuse.train.judge.step_comparison import StepComparison
from fusion_advisor.fuse.train.passes.both_passes import BothPasses
from fusion_advisor.fuse.train.passes.recomputed import kept_bytes
from fusion_advisor.records import GraphRewrite, ModelCheck, Status


@dataclass(frozen=True, kw_only=True)
class RecomputeTrial:
    """A step without an option and with it.

    Attributes:
        option: the option.
        whole: both passes without it.
        make: traces both passes with it, which takes seconds.
    """

    option: RecomputeOption
    whole: BothPasses
    make: Callable[[], BothPasses]

    @functools.cached_property
    def passes(self) -> BothPasses:
        """Both passes with the option."""
        return self.make()

    def untraced_row(self, reason: str) -> GraphRewrite:
        """Return the row of an option that was not traced.

        Args:
            reason: why not.
        """
        rewrite = self.option.rewrite
        return GraphRewrite(
            id=rewrite.id, name=rewrite.title, stage=rewrite.stage, status=Status.NOT_REPLACED, reason=reason, sites=0
        )  # fmt: skip

    def row(self) -> GraphRewrite:
        """Return the report's row of an option that was not timed."""
        before, after = (sum(kept_bytes(one.graphs).values()) for one in (self.whole, self.passes))
        peaks = self.whole.peak_bytes(chunk_inside), self.passes.peak_bytes(chunk_inside)
        return row_of_option(self.option, self.passes.sites, (before, after), peaks)

    def timed(
        self, row: GraphRewrite, comparison: StepComparison, args: tuple[Any, ...], *, most_share: float = 0.0, why: str = ""
    ) -> tuple[GraphRewrite, ModelCheck | None]:  # fmt: skip
        """Time the step with the option against the step without, both with their kernels.

        Args:
            row: of :meth:`row`.
            comparison: with the graph's own ops.
            args: the tensors of a call.
            most_share: of the step's time that it may cost with confidence and stay.
            why: it is tried; ends the row's reason.

        Returns:
            The row with its verdict, and the check of the step with the option, where it was made.
        """
        step, found = comparison.step(args), None
        try:
            self.passes.optimise(lambda: step.run(self.passes.call))
            change = comparison.timed(step, self.whole.call, self.passes.call)
            is_left_out = is_too_slow(change, most_share)
            wrong, found = ("", None) if is_left_out else comparison.checked(step, self.passes.call)
            row = verdict_on_option(row, wrong, change, most_share=most_share, why=why)
        except torch.cuda.OutOfMemoryError:
            row = replace(row, reason=f"{NO_MEMORY}; {row.reason}")
        return row, found
