"""The rewrite's record: its id, and which losses of a graph it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from fusion_advisor import units
from fusion_advisor.fuse.loss.chunked_loss import chunk_bytes
from fusion_advisor.fuse.loss.find_loss import LossSite, find_losses
from fusion_advisor.fuse.loss.peak_memory import is_op
from fusion_advisor.fuse.loss.put_loss import ChunkedGraph, with_all_logits, with_chunked_losses
from fusion_advisor.fuse.rewrite.record import StepRewrite
from fusion_advisor.records import GraphRewrite, Status
from fusion_advisor.timing.paired import Comparison

LINEAR_CROSS_ENTROPY = StepRewrite(id="linear-cross-entropy", title="loss without the logits")
LEAST_BYTES = 16 << 20
"""Smaller logits are left alone: their memory is no matter, and a loss in chunks launches more kernels."""


@dataclass(frozen=True, slots=True)
class LossPlan:
    """What the rewrite does to a graph.

    Attributes:
        row: of the report, before anything was checked or timed.
        chunked: the graph with its losses in chunks; None where none can be.
        whole: the graph with its losses as they are that returns None where ``chunked`` does; None where that returns all.
    """

    row: GraphRewrite
    chunked: ChunkedGraph | None = None
    whole: GraphModule | None = None


def plan_losses(graph_module: GraphModule, *, drops_logits: bool, least_bytes: int = LEAST_BYTES) -> LossPlan | None:
    """Find the losses of dynamo's graph that can be computed in chunks; None where there is none with large logits.

    A step that returns its logits is left alone: its caller may read them, and then they have to be there.

    Args:
        graph_module: dynamo's.
        drops_logits: the caller reads no logits, and is given None in their place.
        least_bytes: of logits.
    """
    sites = [site for site in find_losses(graph_module.graph) if site.logits_bytes >= least_bytes]
    if not sites:
        return None
    taken = [site for site in sites if not site.refusal and (drops_logits or not site.returned)]
    if not taken:
        row = _row(len(sites), Status.NOT_REPLACED, _why_none(sites))
        return LossPlan(replace(row, saved_bytes=sum(spared_bytes(site) for site in sites if not site.refusal)))
    chunked = with_chunked_losses(graph_module, taken)
    whole = with_all_logits(graph_module, taken) if chunked.dropped else None
    return LossPlan(_row(len(taken), Status.PLANNED, ""), chunked, whole)


def spared_bytes(site: LossSite) -> int:
    """Return how many bytes a step takes less at least: its logits and their gradient. What a chunk holds is taken off.

    Args:
        site: of a graph of dynamo's.
    """
    value = site.linear.meta["example_value"]
    columns, width = value.shape[-1], _width(site)
    return 2 * site.logits_bytes - chunk_bytes(value.numel() // columns, columns, width, value.element_size())


def _width(site: LossSite) -> int:
    source = site.linear.all_input_nodes[0].meta["example_value"]
    return int(source.shape[-1])


def chunk_inside(node: Node) -> int:
    """Return what the op of a loss in chunks holds while it runs, for :func:`step_peak_bytes`.

    Args:
        node: of a graph of AOTAutograd's.
    """
    first = {
        "fusion_advisor::linear_cross_entropy": 0, "fusion_advisor::linear_cross_entropy_backward": 1,
        "fusion_advisor::linear_cross_entropy_and_log_sums": 0, "fusion_advisor::linear_cross_entropy_and_log_sums_backward": 2,
    }  # fmt: skip
    name = next((name for name in first if is_op(node, name)), None)
    if name is None:
        return 0
    hidden, weight = (one.meta["val"] for one in node.args[first[name] :][:2] if isinstance(one, Node))
    dtype = node.args[first[name] + 4]
    assert isinstance(dtype, torch.dtype)
    rows, width = hidden.shape
    return chunk_bytes(rows, weight.shape[0], width, dtype.itemsize)


def _why_none(sites: Sequence[LossSite]) -> str:
    returned = [site for site in sites if not site.refusal]
    if not returned:
        return sites[0].refusal
    logits = units.size(sum(site.logits_bytes for site in returned))
    spared = units.size(sum(map(spared_bytes, returned)))
    return (
        f"the step returns its logits ({logits}), which its caller may read; with --drop-logits it returns None in their place "
        f"and takes at least {spared} less at its peak"
    )


def _row(sites: int, status: Status, reason: str) -> GraphRewrite:
    return GraphRewrite(
        id=LINEAR_CROSS_ENTROPY.id, name=LINEAR_CROSS_ENTROPY.title, stage=LINEAR_CROSS_ENTROPY.stage, status=status,
        reason=reason, sites=sites,
    )  # fmt: skip


def judged(
    row: GraphRewrite, status: Status, reason: str, *, saved_bytes: int = 0, delta_ns: int | None = None,
    interval_ns: tuple[int, int] | None = None,
) -> GraphRewrite:  # fmt: skip
    """Return a row with its verdict.

    Args:
        row: of a plan.
        status: the verdict.
        reason: for it.
        saved_bytes: of the step at its peak, where it stays.
        delta_ns: time of the step with it less the time without.
        interval_ns: of that difference.
    """
    return replace(
        row, status=status, reason=reason, saved_bytes=saved_bytes, step_delta_ns=delta_ns, step_delta_ci_ns=interval_ns
    )  # fmt: skip


def verdict_on_loss(
    row: GraphRewrite, reason: str, change: Comparison | None, saved_bytes: int, *, least_share: float, words: str = ""
) -> GraphRewrite:
    """Return the row of losses in chunks: they stay if their numbers pass and the step is not measurably slower with them.

    They need not be faster: they are there for the memory. Where a step waits for Python, its times scatter by more than the
    losses take: of BERT-large's on an H200 the interval of the difference was 0.1 to 15 ms.

    Args:
        row: before.
        reason: what is wrong with the numbers; empty where they pass.
        change: of the step's time; None where it was not timed.
        saved_bytes: of the step at its peak.
        least_share: of the step that they must cost, with confidence, to go.
        words: how the step was timed.
    """
    if reason:
        return judged(row, Status.WRONG_NUMBERS, reason)
    interval = None if change is None else (change.low_ns, change.high_ns)
    delta_ns = None if change is None else change.delta_ns
    if saved_bytes <= 0:
        return judged(row, Status.NOT_REPLACED, "the step takes no less memory at its peak without the logits")
    if change is not None and change.ratio_high < 1 - max(least_share, 0.0):
        reason = (
            f"the step is slower without the logits{words}, which would spare {units.size(saved_bytes)} at its peak; "
            "a --memory-budget below 1 takes them out all the same"
        )
        return judged(row, Status.SLOWER, reason, delta_ns=delta_ns, interval_ns=interval)
    reason = f"the step takes {units.size(saved_bytes)} less at its peak, by the lifetimes of its tensors"
    return judged(row, Status.KEPT, reason, saved_bytes=saved_bytes, delta_ns=delta_ns, interval_ns=interval)
