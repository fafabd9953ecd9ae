"""CUDA graphs of steps with collectives: all ranks record the same call at the same time, and none keeps what another one lacks.

A graph holds NCCL's kernels, and a replay runs them in the order in which they were recorded. The order is equal on all ranks,
because all ranks record the same region. Where one rank cannot record, all run launch by launch: NCCL sets up what it records
with the other ranks, so a recorded collective need not fit one that is launched by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from fusion_advisor.fuse.cuda_graph.recording import Recorder
from fusion_advisor.fuse.installed import LastStage, graph_recorder
from fusion_advisor.fuse.live.cuda_graph_choice import choose_graph
from fusion_advisor.ranks.group import Ranks
from fusion_advisor.ranks.instruments import worst_problem
from fusion_advisor.records import GraphRewrite
from fusion_advisor.timing.host_timer import HostTimer
from fusion_advisor.timing.interleaving import CannotRecord


def records_together(config: str | None = None) -> bool:
    """Whether the ranks' GPUs talk through NCCL, whose kernels a CUDA graph can hold.

    Args:
        config: backends by device, ``cpu:gloo,cuda:nccl``; those of the group that was joined by default.
    """
    if config is None:
        config = dist.get_backend_config() if dist.is_initialized() else ""
    return "cuda:nccl" in config.split(",")


class _Replay:
    """A recorded graph, which is gone once the ranks part."""

    def __init__(self, play: Callable[[], None]) -> None:
        self._play: Callable[[], None] | None = play

    def __call__(self) -> None:
        """Launch the graph.

        Raises:
            RuntimeError: the ranks have parted, and no collective can run.
        """
        if self._play is None:
            raise RuntimeError("the ranks have parted, so their collectives cannot run any longer")
        self._play()

    def release(self) -> None:
        """Let go of the graph."""
        self._play = None


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
        self._ranks.gather("a CUDA graph's begin", None)
        problem, made = "", None
        try:
            made = self._own.record(call)
        except CannotRecord as error:
            problem = str(error) or "the driver gave no reason"
        worst = worst_problem(self._ranks, problem)
        if made is None or worst:
            raise CannotRecord(worst)
        play, result = made
        replay = _Replay(play)
        self._ranks.holds(replay.release)
        return replay, result

    def pool_bytes(self) -> int:
        """Device memory that this rank's graphs hold."""
        return self._own.pool_bytes()


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
        return choose(*args, **{**kwargs, "on_cuda": False, "timer": timer})

    return replace(stage, graph_recorder=recorder_of, choose_graph=chosen, holds_collectives=True)
