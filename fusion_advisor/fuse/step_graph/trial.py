"""Do CUDA graphs around both passes of a training step pay? Decided by the wall time of the whole step, once its numbers pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fusion_advisor import units
from fusion_advisor.fuse.passes.cuda_graph import CUDA_GRAPH
from fusion_advisor.fuse.passes.registry import row_of
from fusion_advisor.fuse.rewrite.device_memory import release_cached_memory
from fusion_advisor.fuse.step_graph.step_graph import StepGraph
from fusion_advisor.records import GraphRewrite, Status
from fusion_advisor.timing.paired import Comparison

_WARM = 4
"""Steps ahead: the first shows which arguments move, the second is recorded; by then others may have moved."""
_NOT_REPLAYED = "the step did not run through its graphs"
_NO_MEMORY = "no memory is left for graphs of both passes next to the step that they are compared with"


def try_step_graph(
    graphs: StepGraph, step: Callable[[], Any], without: Callable[[], Any], *, numbers: Callable[[], str],
    compare: Callable[[Callable[[], Any], Callable[[], Any]], Comparison] | None,
) -> GraphRewrite:  # fmt: skip
    """Record a step, judge its numbers and its time, and switch its graphs on or off for good.

    Args:
        graphs: of both passes.
        step: runs the step by them, where they are on.
        without: what they have to beat: the step launch by launch, or the model's own ops where nothing else is kept.
        numbers: runs the step by its graphs and says what is wrong with its gradients; empty where they pass.
        compare: times two ways to run the step in turn; None where times decide nothing.

    Returns:
        The row of the report.
    """
    graphs.is_on = True
    held_bytes = 0
    try:
        for _ in range(_WARM):
            step()
        held_bytes = graphs.pool_bytes
        row = _judged(graphs, step, without, numbers, compare)
    except torch.cuda.OutOfMemoryError:
        row = row_of(CUDA_GRAPH, status=Status.NOT_REPLACED, reason=_NO_MEMORY, sites=0)
    graphs.forget()
    graphs.is_on = row.status is Status.KEPT
    if not graphs.is_on:
        release_cached_memory()
    return replace(row, held_bytes=held_bytes if row.sites else 0)


def _judged(
    graphs: StepGraph, step: Callable[[], Any], without: Callable[[], Any], numbers: Callable[[], str],
    compare: Callable[[Callable[[], Any], Callable[[], Any]], Comparison] | None,
) -> GraphRewrite:  # fmt: skip
    if not all(graphs.replays):
        return row_of(CUDA_GRAPH, status=Status.NOT_REPLACED, reason=next(iter(graphs.refusals), _NOT_REPLAYED), sites=0)
    if wrong := numbers():
        return row_of(CUDA_GRAPH, status=Status.WRONG_NUMBERS, reason=wrong, sites=2)
    if compare is None:
        return row_of(CUDA_GRAPH, status=Status.KEPT, reason="its gradients pass; no time was judged", sites=2)

    def before() -> None:
        graphs.is_on = False
        without()

    def after() -> None:
        graphs.is_on = True
        step()

    change = compare(before, after)
    if graphs.is_refused:
        return row_of(CUDA_GRAPH, status=Status.NOT_REPLACED, reason=next(reversed(graphs.refusals)), sites=0)
    interval = units.delta_interval(change.low_ns, change.high_ns)
    said = f"forward and backward together {units.delta(change.delta_ns)} {interval} by the wall clock"
    is_faster = change.high_ns < 0
    status = Status.KEPT if is_faster else Status.SLOWER if change.low_ns > 0 else Status.WITHIN_NOISE
    return replace(
        row_of(CUDA_GRAPH, status=status, reason=said, sites=2),
        step_delta_ns=change.delta_ns, step_delta_ci_ns=(change.low_ns, change.high_ns),
    )  # fmt: skip
