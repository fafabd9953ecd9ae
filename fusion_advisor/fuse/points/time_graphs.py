"""Times ways to run a piece's graph against each other at one point, in the way in which calls run it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.capture.sizes.one_size import at_one_size
from fusion_advisor.capture.sizes.open_capture import OpenCapture
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.decide.step_runner import StepRunner
from fusion_advisor.fuse.points.decide import RangeWork
from fusion_advisor.fuse.shapes.time_calls import time_calls
from fusion_advisor.records import Timing
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.wall_timer import as_timing

_ROUNDS = 20


def time_graphs(
    work: RangeWork, opened: OpenCapture, ways: Sequence[Callable[..., Any]], given: tuple[Any, ...], written: Written, *,
    budget_s: float,
) -> list[Timing]:  # fmt: skip
    """Time rewritten graphs: in CUDA graphs where these serve the call, launch by launch elsewhere.

    Args:
        work: on the piece's call.
        opened: the piece's graph.
        ways: to run it, called with what follows.
        given: what the graph is called with at a point; a KV cache among it is as it was when this returns.
        written: what such a call writes to.
        budget_s: for all ways.
    """
    measured = work.instruments
    if not work.ranged.may_pad:  # a large prefill in two graphs would hold its memory twice
        return time_calls(ways, given, {}, measured, on_cuda=work.on_cuda, written=written, budget_s=budget_s)
    live = at_one_size(opened, given, written)
    bench = Bench(live, on_cuda=work.on_cuda, timer=measured.timer, rest=measured.rest, record=measured.record)
    runner = StepRunner(bench)
    try:
        with torch.no_grad():
            calls = runner.recorded([functools.partial(way, *given) for way in ways])
            times = interleaving.interleave(
                calls, rounds=_ROUNDS, budget_s=budget_s, rest=runner.rest(calls), on_cuda=runner.on_cuda, before=runner.rewind,
                timer=runner.timer,
            )  # fmt: skip
        del calls
    finally:
        runner.rewind()
    runner.forget()
    return [as_timing(side, runner.method) for side in times]
