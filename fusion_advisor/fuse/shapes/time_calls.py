"""Times ways to make one call against each other; what the call changes in its objects is put back ahead of each run.

Figures: ``docs/measurements/ranges.md``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.records import Timing
from fusion_advisor.runtime.call_tensors import objects_in
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.host_timer import step_timer
from fusion_advisor.timing.wall_timer import as_timing

_ROUNDS = 20
_BUDGET_S = 2.0
_TURN_S = 0.05
"""On a GPU a way is run again and again for so long, as people call a model. Where the host limits a call, single calls in turn
find its caches full of the other way: GPT-2's prefill then seemed slower than eager and was a fifth faster in a row."""


def time_calls(
    ways: Sequence[Callable[..., Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any], instruments: Instruments, *,
    on_cuda: bool, written: Written | None = None, budget_s: float = _BUDGET_S,
) -> list[Timing]:  # fmt: skip
    """Time each way launch by launch: GPU time by CUDA events, on a CPU what the instruments' timer reads.

    Args:
        ways: called with the arguments below.
        args: of the call.
        kwargs: of the call; a KV cache among them is as it was when this returns.
        instruments: measure.
        on_cuda: whether the call runs on a GPU.
        written: what the call writes to.
        budget_s: for all ways.
    """
    timer = instruments.timer or step_timer(on_cuda=on_cuda)
    objects = [(vars(owner), dict(vars(owner))) for owner in objects_in((args, dict(kwargs)))]

    def put_back() -> None:
        for attributes, before in objects:
            attributes.clear()
            attributes.update(before)
        if written is not None:
            written.rewind()

    def bound(way: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: way(*args, **kwargs)

    calls = [bound(way) for way in ways]
    try:
        with torch.no_grad():
            for call in itertools.chain(calls, calls):
                put_back()
                call()
            times = interleaving.interleave(
                calls, rounds=_ROUNDS, budget_s=budget_s, on_cuda=on_cuda, turn_s=_TURN_S if on_cuda else 0.0, timer=timer,
                before=put_back,
            )  # fmt: skip
    finally:
        put_back()
    return [as_timing(side, "cuda_events" if on_cuda else timer.method) for side in times]
