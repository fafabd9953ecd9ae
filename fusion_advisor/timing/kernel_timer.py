"""Timing contenders side by side: inputs that rotate past the cache, interleaved repetitions.

On a GPU every contender is recorded into one CUDA graph of its own that holds one call per set of inputs, so neither Python nor
the launch path is in the figure; that is what a kernel costs inside a model that runs from a graph. On a CPU the same calls are
made from Python and timed by the host's clock.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fusion_advisor.runtime.graph_capture import recording_into
from fusion_advisor.timing.alone import timed_alone
from fusion_advisor.timing.interleaving import CannotRecord, recorded

_CACHE_FACTOR = 3
_MOST_SETS = 512
_LEAST_SETS = 2
_LEAST_REPLAY_NS = 1_000_000
"""A replay shorter than this would be measured by the resolution of the events, and the work around it."""
_MOST_CALLS = 512
_LEAD_LAUNCHES = 256
"""About 0.3 ms of empty launches: the host enqueues events and graph while they run, so its own time is not measured."""
_DEFAULT_CPU_CACHE = 2**25

Call = Callable[[int], Any]
"""Does the work once, on the inputs of the set with this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """How many sets of inputs there are, and how many calls one repetition holds (a multiple of the sets)."""

    sets: int
    calls: int
    is_past_cache: bool


def plan_rotation(
    input_bytes: int, output_bytes: int, cache_bytes: int, least_ns: float, free_bytes: int, *, most_sets: int = _MOST_SETS
) -> Rotation:
    """Choose sets and calls.

    Args:
        input_bytes: of one set.
        output_bytes: of one call; every call of a repetition keeps its own.
        cache_bytes: last-level cache.
        least_ns: what one call takes at least.
        free_bytes: memory that may be used.
        most_sets: tiny inputs would need millions of sets to fill a cache; they are read from it then, as in a model,
            where the kernel before has just written them.
    """
    wanted = _CACHE_FACTOR * cache_bytes // max(input_bytes, 1) + 1
    room = max(1, free_bytes // 2 // max(input_bytes + output_bytes, 1))
    sets = max(1, min(max(wanted, _LEAST_SETS), most_sets, room))
    # Every contender's graph holds the outputs of all its calls at once.
    most = max(1, min(_MOST_CALLS, free_bytes // 12 // max(output_bytes, 1)) // sets)
    rounds = max(1, min(most, -(-_LEAST_REPLAY_NS // max(round(least_ns * sets), 1))))
    return Rotation(sets=sets, calls=sets * rounds, is_past_cache=sets * input_bytes > _CACHE_FACTOR * cache_bytes)


class Clock(Protocol):
    """Times repetitions of a contender on one kind of device."""

    method: str

    def prepare(self, call: Call, rotation: Rotation) -> Callable[[], object]:
        """Return what runs one repetition. Raises CannotRecord."""
        ...

    def time_ns(self, repetition: Callable[[], object]) -> int:
        """Run one repetition and return its duration."""
        ...


class CudaClock:
    """CUDA graphs between two events."""

    method = "cuda_graph"

    def __init__(self) -> None:
        self._one = torch.zeros(1, device="cuda")  # the graph writes to it as long as it lives
        self._lead = recorded(lambda: self._one.add_(1), repeats=_LEAD_LAUNCHES)

    def prepare(self, call: Call, rotation: Rotation) -> Callable[[], object]:
        """Record one call per set (and round) into a graph.

        Raises:
            CannotRecord: the work cannot be captured.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            for number in range(min(2, rotation.sets)):
                call(number)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Kept until the capture ends: outputs that share one buffer would stay in the cache and never be written to memory.
        kept = []
        try:
            with torch.no_grad(), recording_into(graph):
                kept = [call(number % rotation.sets) for number in range(rotation.calls)]
        except RuntimeError as error:
            raise CannotRecord(str(error).strip().splitlines()[0]) from error
        del kept
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def time_ns(self, repetition: Callable[[], object]) -> int:
        """Replay once, with the device kept busy until the replay is enqueued."""
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._lead()
        start.record()
        repetition()
        stop.record()
        stop.synchronize()
        return round(start.elapsed_time(stop) * 1e6)


class WallClock:
    """The host's clock around calls from Python."""

    method = "wall"

    def prepare(self, call: Call, rotation: Rotation) -> Callable[[], object]:
        """Return a loop over the sets, run once already."""

        def repetition() -> None:
            with torch.no_grad():
                for number in range(rotation.calls):
                    call(number % rotation.sets)

        repetition()
        return repetition

    def time_ns(self, repetition: Callable[[], object]) -> int:
        """Run once."""
        start = time.perf_counter_ns()
        repetition()
        return time.perf_counter_ns() - start


def make_clock(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else WallClock()


@timed_alone
def interleaved(
    clock: Clock,
    repetitions: Sequence[Callable[[], object]],
    calls: int,
    *,
    rounds: int,
    budget_s: float,
    least: int = 6,
    still_open: Callable[[Sequence[Sequence[int]]], Collection[int]] | None = None,
) -> list[list[int]]:
    """Time contenders against each other.

    Args:
        clock: of their device.
        repetitions: one per contender, warm.
        calls: that each repetition makes.
        rounds: the most rounds; each runs every contender once, in an order that rotates and turns around.
        budget_s: stop after this many seconds, but never before ``least`` rounds.
        least: the fewest rounds.
        still_open: which contenders go on, by the times so far; the others have fewer times. None: all of them do.

    Returns:
        Nanoseconds of one call, per contender and round.
    """
    times: list[list[int]] = [[] for _ in repetitions]
    order = list(range(len(repetitions)))
    started = time.perf_counter()
    for number in range(rounds if repetitions else 0):
        if number >= least and time.perf_counter() - started > budget_s:
            break
        turned = order[number % len(order) :] + order[: number % len(order)]
        for position in turned if number % 2 else reversed(turned):
            times[position].append(round(clock.time_ns(repetitions[position]) / calls))
        if still_open is not None:
            left = still_open(times)
            order = [position for position in order if position in left]
    return times


def cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [
        int(number) * {"K": 2**10, "M": 2**20, "G": 2**30}.get(unit, 1)
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        for number, unit in re.findall(r"(\d+)([KMG]?)", path.read_text(encoding="ascii", errors="replace"))[:1]
    ]
    return max(sizes, default=_DEFAULT_CPU_CACHE)


def free_bytes(device: torch.device) -> int:
    """Memory that a measurement may fill; on a CPU a modest part, for the machine is not ours alone."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 2**31
