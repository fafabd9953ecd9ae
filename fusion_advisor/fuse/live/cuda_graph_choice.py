"""Does a CUDA graph around the step pay? Decided by wall time, the way a user calls the model.

Device time cannot say: a graph changes no kernel, it takes away the host's time between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.keep_rule import PATIENCE
from fusion_advisor.fuse.decide.step_runner import changes, open_steps
from fusion_advisor.fuse.decide.verdict import Verdict, is_unclear, once_more, untimed, verdict_of
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.passes.cuda_graph import CUDA_GRAPH
from fusion_advisor.fuse.passes.registry import row_of
from fusion_advisor.fuse.prediction.interval import CALIBRATION
from fusion_advisor.records import GraphBreak, GraphRewrite, Status
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.clock_sampler import is_held_down
from fusion_advisor.timing.host_timer import HostTimer, WallTimer
from fusion_advisor.timing.wall_timer import nothing


def why_no_graph(breaks: Sequence[GraphBreak], runs: Sequence[int]) -> str | None:
    """Say why a captured model cannot run as one graph, before anything is recorded; None when nothing speaks against it.

    Args:
        breaks: that dynamo met.
        runs: how often a step runs each captured graph.
    """
    if breaks:
        return f"the step is broken at {breaks[0].source or 'an unknown line'}: {breaks[0].reason}"
    if len(runs) != 1:
        return f"the step was captured in {len(runs)} graphs"
    return f"the step runs its captured graph {runs[0]} times, and Python of the model's own in between" if runs[0] != 1 else None


_AFTER_GRAPH = "runs after the graph and writes into memory that the caller keeps"


def choose_graph(
    fused: FusedModel,
    call: Callable[[], Any],
    without: Callable[[], Any],
    *,
    min_gain: float,
    confidence: float,
    rounds: int,
    budget_s: float,
    least_s: float = 0.0,
    wait: Callable[[], None],
    on_cuda: bool,
    device_ns: int | None = None,
    rewind: Callable[[], object] = nothing,
    is_timed: bool = True,
    rest: float | None = None,
    timer: HostTimer | None = None,
) -> GraphRewrite:
    """Time the step with its graph against the step without, and switch the graph on or off for good.

    Args:
        fused: with ``graphs``; not necessarily in place.
        call: the fused step.
        without: what the graph has to beat: the fused step launch by launch, or the eager one where nothing else was kept.
        min_gain: share of the step that must be saved.
        confidence: of the interval.
        rounds: the most rounds.
        budget_s: seconds of timing, fewer where a look decides; twice as many once more where that is too little to tell.
        least_s: seconds for each side at least, beyond ``rounds`` and ``budget_s``.
        wait: returns when the device has nothing left to do.
        on_cuda: whether that is a GPU, whose power limit may throttle it.
        device_ns: what the device takes for the step when nothing keeps it waiting; the step is expected to come down to that
            and what a call of a graph costs.
        rewind: called ahead of each run, untimed: it puts back what a step moves on.
        is_timed: False switches the graph on if it can be recorded.
        rest: idle time ahead of each run, as a multiple of the run before it, where the power limit is known to hold the step's
            replays down or not to; None: found out.
        timer: times the calls; left out, the wall clock.
    """
    graphs = fused.graphs
    assert graphs is not None
    sides = _Sides(graphs=graphs, call=call, without=without, wait=wait, rewind=rewind)
    sides.record()
    if not graphs.recordings:
        graphs.is_on = False
        reason = next(iter(graphs.refusals), "the step did not run through its graph")
        return row_of(CUDA_GRAPH, status=Status.NOT_REPLACED, reason=reason, sites=0)
    if not is_timed:
        return _switched(graphs, untimed(CUDA_GRAPH.id), None)
    # The graph is still on: queued runs are replays.
    if rest is None:
        rest = interleaving.REST if is_held_down([call], on_cuda=on_cuda, before=rewind) else 0.0
    rule = _Rule(min_gain=min_gain, confidence=confidence, rounds=rounds, least_s=least_s, rest=rest, timer=timer or WallTimer())
    verdict, step_ns = sides.compare(rule, budget_s)
    if is_unclear(verdict, step_ns, min_gain):
        verdict = once_more(verdict, sides.compare(rule, 2 * budget_s)[0])
    predicted_ns = None if device_ns is None else max(0, round(step_ns) - device_ns - CALIBRATION.graph_call_ns)
    return _switched(graphs, verdict, predicted_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """How long the two sides are timed, and what the graph must save; the fields are :func:`choose_graph`'s.

    Attributes:
        rest: idle time ahead of each run, as a multiple of the run before it.
    """

    min_gain: float
    confidence: float
    rounds: int
    least_s: float
    rest: float
    timer: HostTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """The step with its graph and the step without; the fields are :func:`choose_graph`'s."""

    graphs: Graphs
    call: Callable[[], Any]
    without: Callable[[], Any]
    wait: Callable[[], None]
    rewind: Callable[[], object]

    def with_graph(self) -> None:
        """Run the fused step, by its graph where it has one, and wait for it."""
        self.graphs.is_on = True
        self.call()
        self.wait()

    def plain(self) -> None:
        """Run what the graph has to beat, and wait for it."""
        self.graphs.is_on = False
        self.without()
        self.wait()

    def record(self) -> None:
        """Run the step until its graph is replayed."""
        with torch.no_grad():
            for _ in range(3):  # warm, recorded, replayed
                self.rewind()
                self.with_graph()

    def compare(self, rule: _Rule, seconds: float) -> tuple[Verdict, float]:
        """Return the verdict of so many seconds of timing, and the step without the graph in nanoseconds."""
        with torch.no_grad():
            times = interleaving.interleave(
                [self.plain, self.plain, self.with_graph], rounds=rule.rounds, budget_s=seconds, least_s=3 * rule.least_s,
                most_s=PATIENCE * seconds, rest=rule.rest, is_settled=interleaving.is_quiet(rule.min_gain, rule.confidence),
                still_open=open_steps(rule.min_gain, rule.confidence, rule.rest),
                on_cuda=False, before=self.rewind, timer=rule.timer,
            )  # fmt: skip
        (one,) = changes(times, rule.min_gain, rule.confidence, rule.rest)
        verdict = verdict_of(CUDA_GRAPH.id, one.change, step_ns=one.step_ns, noise_ns=one.noise_ns, min_gain=rule.min_gain)
        return verdict, one.step_ns


def _switched(graphs: Graphs, verdict: Verdict, predicted_ns: int | None) -> GraphRewrite:
    """Switch graphs on or off for good, and return their row."""
    graphs.is_on = verdict.status is Status.KEPT
    pool_bytes = graphs.pool_bytes()
    after_graph = ", ".join(f"`{memory.name}`" for memory in graphs.recordings[-1].memories if memory.name)
    if not graphs.is_on:
        graphs.forget()
    reason = (
        f"{'wall time ' if verdict.is_timed else ''}{verdict.reason}{f'; {after_graph} {_AFTER_GRAPH}' if after_graph else ''}"
    )
    return replace(
        row_of(CUDA_GRAPH, status=verdict.status, reason=reason, sites=1),
        step_delta_ns=verdict.step_delta_ns,
        step_delta_ci_ns=verdict.step_delta_ci_ns,
        predicted_saving_ns=predicted_ns,
        held_bytes=pool_bytes,
    )
