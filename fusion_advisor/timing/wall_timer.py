"""Repeated timing without a profiler: wall time of calls, and the interval of a median.

Intervals come from order statistics (the binomial interval of the median), which needs no distribution, no resampling and no
random numbers, so a report can be recomputed from its raw times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch

from fusion_advisor.records import Clocks, Timing
from fusion_advisor.timing.alone import timed_alone
from fusion_advisor.timing.host_timer import HostTimer, WallTimer


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Return (median, low, high) where low and high bound the median with at least ``confidence``.

    Where no order statistic reaches the confidence (below six values at 95 %), the interval is the whole range.
    """
    ordered = sorted(values)
    outside = _ranks_outside(len(ordered), confidence)
    return statistics.median(ordered), ordered[outside], ordered[-1 - outside]


def _ranks_outside(count: int, confidence: float) -> int:
    """Return how many values lie outside at each end: exact, by the binomial distribution of how many fall below the median."""
    allowed = int((1 - confidence) / 2 * 2**60) << count >> 60  # in whole numbers: 2**count is no float from 1,024 on
    outside, below = 0, 1
    while below + math.comb(count, outside + 1) <= allowed:
        outside += 1
        below += math.comb(count, outside)
    return outside


def as_timing(times_ns: Sequence[int], method: str, clocks: Clocks | None = None, *, rest: float = 0.0) -> Timing:
    """Summarise raw times; ``rest`` as in :class:`~fusion_advisor.records.Timing`."""
    middle, low, high = median_interval(times_ns)
    return Timing(
        times_ns=tuple(times_ns),
        median_ns=round(middle),
        ci_low_ns=round(low),
        ci_high_ns=round(high),
        method=method,
        clocks=clocks,
        rest=rest,
    )


_WALL = WallTimer()
_LEAST_RUNS, _KNOWN_BY = 5, 10


def nothing(*_: object) -> None:
    """Do nothing, where a callable is wanted."""


@timed_alone
def wall_times(
    call: Callable[[], object],
    *,
    runs: int,
    budget_s: float,
    on_cuda: bool,
    warmup: int = 2,
    least_s: float = 0.0,
    known_to: float = 0.0,
    before: Callable[[], object] = nothing,
    after: Callable[[int, int], object] = nothing,
    timer: HostTimer = _WALL,
) -> list[int]:
    """Time ``call`` from the host's side, waiting for the device after each run.

    Args:
        call: the work.
        runs: the most runs, ``least_s`` aside; at least five are made whatever the budget says.
        budget_s: stop after this many seconds.
        on_cuda: synchronise the device.
        warmup: runs before the first timed one.
        least_s: go on until this much time has been measured, beyond ``runs`` and ``budget_s``.
        known_to: stop once the median is known to within this share of it, after ten runs at least; 0: never for that.
        before: called ahead of each run and not timed (it puts back what a run moves on).
        after: called after each run and not timed, with the run's number and its nanoseconds.
        timer: times the runs.

    Returns:
        One duration in nanoseconds per run.
    """
    wait: Callable[[], object] = torch.cuda.synchronize if on_cuda else nothing
    for _ in range(warmup):
        before()
        call()
    wait()
    times: list[int] = []
    measured_ns, started = 0, timer.seconds()

    def waited() -> None:
        call()
        wait()

    def is_over() -> bool:
        is_spent = len(times) >= runs or (len(times) >= _LEAST_RUNS and timer.seconds() - started >= budget_s)
        return measured_ns >= least_s * 1e9 and (is_spent or _is_known(times, known_to))

    while not is_over():
        if before is not nothing or after is not nothing:
            before()
            wait()
        times.append(timer.time_ns(waited))
        measured_ns += times[-1]
        after(len(times) - 1, times[-1])
    return times


def _is_known(times: Sequence[int], share: float) -> bool:
    """Whether the median of enough runs is known to within a share of it."""
    if len(times) < _KNOWN_BY or not share:
        return False
    middle, low, high = median_interval(times)
    return high - low <= 2 * share * middle
