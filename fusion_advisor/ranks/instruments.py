"""What measures and decides on several ranks: every rank sees the same numbers, and so comes to the same verdicts.

A run's loops end by times, its plan follows from a trace, and its kernels from times of their own. A time that differed between
ranks would send them different ways, and the next collective would wait for good. So each reading is the slowest rank's, the
trace and the launch configurations are rank 0's, and a kernel that fails on one rank is out on all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

from fusion_advisor.autotune.tune import best_tuning
from fusion_advisor.capture.trace.attribute import Step
from fusion_advisor.codegen.common.interface import KernelBuildFailed
from fusion_advisor.collectives.group_kernels import join_group
from fusion_advisor.fuse.decide.graph_diff_cost import saving_alone_ns
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.step_profile import walls
from fusion_advisor.fuse.installed import LastStage
from fusion_advisor.fuse.live.model_check import check_whole_model
from fusion_advisor.fuse.live.restore_plan import measure_warm_up
from fusion_advisor.ranks.group import Ranks, worst_problem
from fusion_advisor.ranks.recording import TimedRecorder, records_together
from fusion_advisor.ranks.split import between_ranks, without_waiting
from fusion_advisor.records import Capture, Launch, ModelCheck, OpNode, Timing
from fusion_advisor.timing.clock_sampler import Gauge, Watch
from fusion_advisor.timing.host_timer import HostTimer, step_timer
from fusion_advisor.workload.device import is_out_of_memory

COMPILED_S = 600.0
"""For so long ranks wait for one that compiles the step with torch.compile: 28 layers take minutes on a busy host."""


class AgreedTimer:
    """A timer whose readings are equal on all ranks.

    Attributes:
        method: of the timings.

    Args:
        own: times calls on this rank.
        ranks: of the run.
    """

    def __init__(self, own: HostTimer, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks
        self.method = own.method

    def time_ns(self, call: Callable[[], object]) -> int:
        """Run a call once and return the slowest rank's nanoseconds."""
        return self.agreed_ns(self._own.time_ns(call))

    def agreed_ns(self, own_ns: int) -> int:
        """Return the slowest rank's nanoseconds for what each rank has timed."""
        return int(max(self._ranks.gather("timed run", own_ns)))

    def seconds(self) -> float:
        """Return rank 0's seconds."""
        return float(self._ranks.first("elapsed time", self._own.seconds()))

    def rest(self, for_ns: int) -> object:
        """Let the device be idle."""
        return self._own.rest(for_ns)


def instruments_of(
    ranks: Ranks, *, on_cuda: bool, on_capture: Callable[[Capture], object], measured: Instruments = MEASURED
) -> Instruments:
    """Return what measures and decides, with answers that are equal on all ranks.

    Args:
        ranks: of the run.
        on_cuda: whether they have GPUs.
        on_capture: gets this rank's own capture.
        measured: what this rank measures by itself: its timer, memory, captures, traced steps, launch parameters, kernels of
            groups and graphs of steps.
    """
    timer = AgreedTimer(measured.timer or step_timer(on_cuda=on_cuda), ranks)

    def free(device: torch.device) -> tuple[int, int]:
        told = ranks.gather("memory", measured.memory_bytes(device))
        return min(one for one, _ in told), min(one for _, one in told)

    def settled(capture: Capture) -> Capture:
        own = measured.settled_capture(capture)
        on_capture(own)
        return agreed_capture(ranks, own)

    def settled_step(step: Step) -> Step:
        return agreed_step(ranks, measured.settled_step(step))

    worst = functools.partial(worst_problem, ranks)
    return Instruments(
        timer=timer,
        compare_alone=functools.partial(measured.compare_alone, record=TimedRecorder(ranks, measured.record, meets=False)),
        change_alone=functools.partial(measured.change_alone, worst=worst),
        saving_alone_ns=functools.partial(saving_alone_ns, worst=worst),
        walls=_walls(timer),
        rested_walls=no_rested_walls,
        memory_bytes=free,
        settled_capture=settled,
        settled_step=settled_step,
        tune=functools.partial(agreed_choice, ranks, measured.tune or best_tuning),
        worst=worst,
        exchange=functools.partial(ranks.gather, patience_s=COMPILED_S),
        group_kernels=measured.group_kernels or functools.partial(join_group, exchange=ranks.gather),
        rest=0.0,
        record=TimedRecorder(ranks, measured.record) if measured.record or (on_cuda and records_together()) else None,
    )


def _walls(timer: HostTimer) -> Callable[..., list[Timing]]:
    """Return what times ways to call the model; the power limit is not looked for, as each rank has a GPU of its own."""
    return functools.partial(walls, timer=timer, gauge=Gauge(watching=lambda **_: nullcontext(Watch(None)), wait=_wait))


def _wait() -> None:
    torch.cuda.synchronize()


def no_rested_walls(calls: Any, **_: object) -> list[Any]:
    """Return no timings after rests: these follow from a GPU's power limit, which each rank has for itself."""
    return [None for _ in calls]


def agreed_capture(ranks: Ranks, own: Capture) -> Capture:
    """Return a rank's capture with rank 0's times, from which all plans follow.

    Args:
        ranks: of the run.
        own: this rank's.

    Raises:
        RanksDiffer: the ranks captured different graphs.
    """
    ranks.agree("the captured graph", "\n".join(map(op_line, own.ops)))
    told = ranks.gather("times between ranks", [_between_ns(own.launches), _between_ns(own.eager_launches)])
    mine = {
        "launches": own.launches, "eager_launches": own.eager_launches, "eager_step": own.eager_step, "bandwidth": own.bandwidth,
        "quality": own.quality,
    }  # fmt: skip
    first = ranks.first("times of the captured step", mine)
    for number, name in enumerate(("launches", "eager_launches")):
        first[name] = without_waiting(first[name], [each[number] for each in told])
    return replace(own, **first)


def agreed_step(ranks: Ranks, own: Step) -> Step:
    """Return rank 0's traced step, in which ops between ranks take what they take on the rank that comes last.

    Each rank's own trace would tell it something else of the rewritten step, and one rank would revert what another one keeps.

    Args:
        ranks: of the run.
        own: this rank's.
    """
    told = ranks.gather("times between ranks of the rewritten step", _between_ns(own.launches))
    first: Step = ranks.first("times of the rewritten step", own)
    return replace(first, launches=without_waiting(first.launches, told))


def _between_ns(launches: Sequence[Launch]) -> tuple[int, ...]:
    return tuple(one.duration_ns for one in between_ranks(launches))


def op_line(op: OpNode) -> str:
    """Return an op in one line: what it computes, of what, in which layout."""
    outputs = [(meta.shape, meta.stride, meta.dtype) for meta in op.outputs]
    return f"{op.index} {op.target} {op.args} {op.kwargs} {outputs} {op.mutates}"


Choice = TypeVar("Choice")


def agreed_choice(ranks: Ranks, choose: Callable[..., Choice], *args: Any, **kwargs: Any) -> Choice:
    """Choose launch parameters on each rank at the same time, and take rank 0's.

    Args:
        ranks: of the run.
        choose: chooses them on this rank.
        args: of ``choose``.
        kwargs: of the same.

    Raises:
        KernelBuildFailed: rank 0 has no kernel.
        MemoryError: rank 0 has no memory for it.
    """
    own: Choice | KernelBuildFailed | MemoryError
    try:
        own = choose(*args, **kwargs)
    except KernelBuildFailed as error:
        own = error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        own = MemoryError(str(error))
    chosen: Choice | KernelBuildFailed | MemoryError = ranks.first("launch parameters", own)
    if isinstance(chosen, KernelBuildFailed | MemoryError):
        raise chosen
    return chosen


def last_stage(ranks: Ranks, instruments: Instruments) -> LastStage:
    """Return what checks the fused model: it passes where it passes on all ranks, and no CUDA graph is recorded.

    Args:
        ranks: of the run.
        instruments: from :func:`instruments_of`.
    """

    def check(*args: Any, **kwargs: Any) -> ModelCheck:
        own = check_whole_model(*args, memory_bytes=instruments.memory_bytes, worst=instruments.worst, **kwargs)
        told: list[ModelCheck] = ranks.gather("the whole model's check", own)
        return next((one for one in told if not one.is_passed), own)

    return LastStage(
        check_model=check, check_part=check, graph_recorder=lambda _: None,
        measure_warm_up=functools.partial(measure_warm_up, worst=instruments.worst, group_kernels=instruments.group_kernels),
    )  # fmt: skip
