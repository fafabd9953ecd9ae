"""Judges options of what the backward pass computes again: what each spares, what it costs, and whether it stays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fusion_advisor.capture.graph.fx_nodes import storages, tensors_of
from fusion_advisor.fuse.loss.recompute_options import RecomputeOption, is_too_slow, row_of_option, verdict_on_option
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

    def again_bytes(self) -> int:
        """Return what the ops read and write, one by one, that the backward pass runs again."""
        known = {node.name for node in self.whole.graphs["backward"].graph.nodes}
        nodes = self.passes.graphs["backward"].graph.nodes
        return sum(_moved_bytes(node) for node in nodes if node.op == "call_function" and node.name not in known)

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


def _moved_bytes(node: Node) -> int:
    """Return the bytes that an op reads and writes; a view moves none."""
    read = {key: value for one in node.all_input_nodes for key, value in _by_storage(one)}
    written = dict(_by_storage(node))
    if not written.keys().isdisjoint(read):
        return 0
    return sum(value.numel() * value.element_size() for value in (*read.values(), *written.values()))


def _by_storage(node: Node) -> list[tuple[int, torch.Tensor]]:
    return list(zip(storages(node), tensors_of(node.meta.get("val")), strict=True))
