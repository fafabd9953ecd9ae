"""CUDA graphs of steps with collectives: all ranks record the same call at the same time, and none keeps what another one lacks.

A graph holds NCCL's kernels, and a replay runs them in the order in which they were recorded. The order is equal on all ranks,
because all ranks record the same calls. Where one rank cannot record, all run launch by launch: NCCL sets up what it records
with the other ranks, so a recorded collective need not fit one that is launched by itself.

A split step is timed as such a graph, as one process times its own. Launched op by op from Python a decode step of 28 layers
takes 20 to 70 ms, in which kernels that save 0.1 ms of 3.5 are noise (``docs/measurements/ranks.md``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fusion_advisor.ranks.group import Ranks
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.interleaving import CannotRecord, Record
from fusion_advisor.workload.device import is_out_of_memory

Made = TypeVar("Made")


def records_together(config: str | None = None) -> bool:
    """Whether the ranks' GPUs talk through NCCL, whose kernels a CUDA graph can hold.

    Args:
        config: backends by device, ``cpu:gloo,cuda:nccl``; those of the group that was joined by default.
    """
    if config is None:
        config = dist.get_backend_config() if dist.is_initialized() else ""
    return "cuda:nccl" in config.split(",")


def together(ranks: Ranks, record: Callable[[], Made], *, meets: bool = True) -> Made:
    """Record when all ranks have come to it, on all ranks or on none.

    Args:
        ranks: of the run.
        record: records on this rank.
        meets: whether the ranks meet in what is recorded. Where they do not, memory that runs out on one is an error on all, and
            all can go on. Where they do, the others wait in a collective then, so that the run ends.

    Raises:
        CannotRecord: this rank or another one cannot.
        MemoryError: on this rank or another one memory ran out.
        RankFailed: a rank does not come, or hangs while it records.
    """
    ranks.gather("a CUDA graph's begin", None)
    problem, made, ran_out = "", None, False
    try:
        made = record()
    except CannotRecord as error:
        problem = str(error) or "the driver gave no reason"
    except (RuntimeError, MemoryError) as error:
        if meets or not is_out_of_memory(error):
            raise
        problem, ran_out = str(error) or "memory ran out", True
    told: list[tuple[str, bool]] = ranks.gather("whether a CUDA graph was recorded", (problem, ran_out))
    for rank, (theirs, ran_out_there) in enumerate(told):
        if theirs:
            words = theirs if rank == ranks.rank else f"rank {rank}: {theirs}"
            raise MemoryError(words) if ran_out_there else CannotRecord(words)
    assert made is not None  # else there was a problem
    return made


class Replay:
    """A recorded graph, which is gone once the ranks part.

    Args:
        play: launches it.
    """

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


class TimedRecorder:
    """Records steps to time them, on all ranks or on none. A graph goes with its replay, and with the group at the latest.

    Args:
        ranks: of the run.
        own: records on this rank; None: :func:`fusion_advisor.timing.interleaving.recorded`.
        meets: as for :func:`together`.
    """

    def __init__(self, ranks: Ranks, own: Record | None = None, *, meets: bool = True) -> None:
        self._ranks = ranks
        self._meets = meets
        # NCCL's own thread goes on asking events while this one records.
        self._own = own or functools.partial(interleaving.recorded, error_mode="thread_local")
        self._alive: weakref.WeakSet[Replay] = weakref.WeakSet()
        self._is_noted = False

    def __call__(self, call: Callable[[], Any], **how: Any) -> Replay:
        """Record a call and return its replay.

        Args:
            call: is recorded.
            how: as for :func:`fusion_advisor.timing.interleaving.recorded`.

        Raises:
            CannotRecord: this rank or another one cannot.
            RankFailed: a rank does not come, or hangs while it records.
        """
        replay = Replay(together(self._ranks, functools.partial(self._own, call, **how), meets=self._meets))
        self._alive.add(replay)
        if not self._is_noted:  # each note stays until the ranks part, and there are hundreds of graphs
            self._ranks.holds(self._release)
            self._is_noted = True
        return replay

    def _release(self) -> None:
        self._is_noted = False
        for replay in list(self._alive):
            replay.release()
