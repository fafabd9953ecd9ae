"""CUDA graphs of the fused model on several ranks: all record a call at the same time, and none keeps what another one lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fusion_advisor.fuse.cuda_graph.recording import Recorder
from fusion_advisor.fuse.installed import LastStage, graph_recorder
from fusion_advisor.fuse.live.cuda_graph_choice import choose_graph
from fusion_advisor.ranks.group import Ranks
from fusion_advisor.ranks.recording import Replay, together
from fusion_advisor.records import GraphRewrite
from fusion_advisor.timing.host_timer import HostTimer

IN_VAIN = "the original ops, after a CUDA graph that did not fit the call"
"""Where ranks meet that took back what they had launched ahead."""


class AgreedRecorder:
    """Records on all ranks or on none; what it recorded is gone when the ranks part.

    Args:
        own: records on this rank.
        ranks: of the run.
    """

    def __init__(self, own: Recorder, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks

    def refusal(self) -> str | None:
        """Say why no graph may be used by the call under way, or None; each rank sees the same, as all make the same calls."""
        return self._own.refusal()

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record a call when all ranks have come to it.

        Raises:
            CannotRecord: this rank or another one cannot.
            RankFailed: a rank does not come, or hangs while it records.
        """
        play, result = together(self._ranks, functools.partial(self._own.record, call))
        replay = Replay(play)
        self._ranks.holds(replay.release)
        return replay, result

    def pool_bytes(self) -> int:
        """Device memory that this rank's graphs hold."""
        return self._own.pool_bytes()

    def give_back(self) -> None:
        """Give the memory of this rank's graphs that are gone back to the device."""
        self._own.give_back()


def with_graphs(
    stage: LastStage,
    ranks: Ranks,
    timer: HostTimer | None,
    *,
    recorder: Callable[..., Recorder | None] = graph_recorder,
    choose: Callable[..., GraphRewrite] = choose_graph,
) -> LastStage:
    """Return a last stage that records on all ranks together.

    Args:
        stage: checks the fused model.
        ranks: of the run.
        timer: whose readings are equal on all ranks.
        recorder: makes what records on this rank's device; None where there are no graphs.
        choose: decides whether the graph stays.
    """

    def recorder_of(bench: Any) -> Recorder | None:
        own = recorder(bench)
        return None if own is None else AgreedRecorder(own, ranks)

    def chosen(*args: Any, **kwargs: Any) -> GraphRewrite:
        # Not on CUDA: a look at this rank's own power limit runs the step as often as this rank finds it takes.
        return choose(*args, **{**kwargs, "on_cuda": False, "rest": None, "timer": timer})

    def meet() -> None:
        ranks.gather(IN_VAIN, None)

    return replace(stage, graph_recorder=recorder_of, choose_graph=chosen, meet=meet)
