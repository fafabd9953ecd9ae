"""Times variants that do the same work in turns, and gives the interval of their paired differences.

Every round times all variants once in random order, and the next round in reverse order, so clock drift hits all of them.
Each timed run follows an untimed run of the same variant, because a GPU at its power limit sets its clock by the previous
run. At that limit two questions need two methods: long turns show how long a step takes when it repeats, and single runs
after rests show which of two steps is faster. Where no such limit holds a step down, a round's runs may follow one another
(``in_a_row``), which takes half the time. Figures: ``docs/measurements/timing.md``.

On a GPU a step is timed as the replay of its own CUDA graph: launches from Python cost the same before and after and would
hide the kernels. On a CPU the call itself is timed.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.records import Timing
from fusion_advisor.runtime.graph_capture import recording_into
from fusion_advisor.timing.alone import timed_alone
from fusion_advisor.timing.host_timer import CPU_TIME, HostTimer, WallTimer, step_timer
from fusion_advisor.timing.known import as_before, until_known_alone
from fusion_advisor.timing.paired import compare_rounds
from fusion_advisor.timing.wall_timer import as_timing, median_interval, nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Paired difference of two candidates, nanoseconds; negative when the second is faster."""

    median_ns: int
    low_ns: int
    high_ns: int


class CannotRecord(Exception):
    """A step that a CUDA graph cannot hold (a sync, an allocation it may not make)."""


Record = Callable[..., Callable[[], None]]
"""Records a call and returns its replay, as :func:`recorded` does."""


def recorded(
    call: Callable[[], Any],
    *,
    pool: Any = None,
    repeats: int = 1,
    before: Callable[[], object] = nothing,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    finish: Callable[[torch.cuda.CUDAGraph], object] | None = None,
    is_warm: bool = False,
    error_mode: str = "global",
) -> Callable[[], None]:
    """Record ``call`` into a CUDA graph and return its replay, which keeps the call.

    Args:
        call: warmed up here on a side stream before it is recorded, unless it is warm.
        pool: memory pool shared with other graphs that are never replayed at the same time.
        repeats: how often the work is recorded into one graph.
        before: called ahead of each warm-up run and not recorded; call it ahead of each replay too.
        around: entered around the capture alone, when the warm-up is over.
        finish: given the captured graph before it is instantiated.
        is_warm: the very call was recorded a moment ago: the step that is timed against itself.
        error_mode: whose calls end the capture; ``thread_local``: this thread's alone.

    Raises:
        CannotRecord: with the driver's sentence.
    """
    if not is_warm:
        _warm_up(call, before)
    graph = torch.cuda.CUDAGraph(keep_graph=finish is not None)
    try:
        with torch.no_grad(), around(), recording_into(graph, pool=pool, capture_error_mode=error_mode):
            for _ in range(repeats):
                call()
        if finish is not None:
            finish(graph)
            graph.instantiate()
    except RuntimeError as error:
        raise CannotRecord(str(error).strip().splitlines()[0]) from error
    torch.cuda.synchronize()
    return functools.partial(_replayed, graph, call)


def _replayed(graph: torch.cuda.CUDAGraph, _call: Callable[[], Any]) -> None:
    """Replay a graph. It reads tensors of the call (folded constants, say), which live as long as it does."""
    graph.replay()


def _warm_up(call: Callable[[], Any], before: Callable[[], object]) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            before()
            call()
    torch.cuda.current_stream().wait_stream(stream)


def always(_: object) -> bool:
    """Say yes, where an answer is wanted."""
    return True


_WALL = WallTimer()
_MOST_REPEATS, _REPEATED_NS = 20, 2_000_000
"""How often a call is recorded into one graph, and for how long such a graph runs."""
TURN_S = 0.2
"""Timed, of each candidate that runs on and on, where the power limit sets the clock. Longer turns leave too few rounds for an
interval: of 7 runs in a row the means differed by 0.22 ms on one H200, but on another by 0.8, where single runs did by 1.2."""
REST = 2.0
"""Idle time of the device between runs that are compared there, as a multiple of the previous run."""
_UNTIMED = 2
"""For so many runs in a turn one more is made ahead, untimed. A clock that an idle device left high came down within 0.2 s."""


@timed_alone
def interleave(
    candidates: Sequence[Callable[[], Any]], *, rounds: int, budget_s: float, on_cuda: bool,
    turn_s: float = 0.0, rest: float = 0.0, in_a_row: bool = False, least: int = 6, least_s: float = 0.0, most_s: float = 0.0,
    is_settled: Callable[[list[list[int]]], bool] = always,
    still_open: Callable[[list[list[int]]], Collection[int] | None] = as_before,
    before: Callable[[], object] = nothing,
    after: Callable[[int, int, int], object] = nothing,
    timer: HostTimer = _WALL,
) -> list[list[int]]:  # fmt: skip
    """Time candidates against each other.

    Args:
        candidates: zero-argument calls, already warm.
        rounds: the most rounds, ``least_s`` aside.
        budget_s: stop after this many seconds, but never before ``least`` rounds.
        on_cuda: time with CUDA events instead of the host's clock.
        turn_s: how long each candidate runs in a round; 0: one timed run.
        rest: ahead of each run the device is idle for so many times as long as the run before it took, and no run is untimed.
        in_a_row: queue a round's runs one after another, behind an untimed one; for replays of CUDA graphs, without rests.
        least: the fewest rounds.
        least_s: go on for so many seconds, beyond ``rounds`` and ``budget_s``.
        most_s: go on for so many seconds at most, beyond ``budget_s``, where the times are not settled.
        is_settled: whether the times so far, of each candidate, will do.
        still_open: which candidates go on, by the times so far; None: the same as before. The others are left out, and the number
            of rounds stays what ``budget_s`` allows for all candidates. It is asked after each round from ``least_s`` on.
        before: called ahead of each run and not timed (it puts back what a run moves on).
        after: called after each turn and not timed, with the round's number, the candidate's position and its nanoseconds.
        timer: times the runs where CUDA events do not, and the budget.

    Returns:
        Nanoseconds per candidate and round: of a run, in a turn of several the mean of the middle half of them. Candidates that
        were left out have fewer.
    """
    schedule = _Schedule(rounds, budget_s, least=least, least_s=least_s, most_s=most_s, is_settled=is_settled)
    timed = functools.partial(_timed_on_host, timer) if not on_cuda else _repeated_on_device
    turns = _Turns(candidates, timed, before, timer)
    turns.warm_up(turn_s, rest)
    times: list[list[int]] = [[] for _ in candidates]
    started = timer.seconds()
    order, orders = list(range(len(candidates))), random.Random(len(candidates))  # the same in each run
    number = 0
    while order and not schedule.is_over(number, timer.seconds() - started, times):
        if number % 2 == 0:
            orders.shuffle(order)
        for position, last_ns in turns.of_round(order[::-1] if number % 2 else order, rest, in_a_row=in_a_row):
            counted_ns = timer.agreed_ns(last_ns) if on_cuda else last_ns  # a host's timer has agreed already
            times[position].append(counted_ns)
            after(number, position, counted_ns)
        number += 1
        taken_s = timer.seconds() - started
        left = still_open(times) if taken_s >= least_s else None
        if left is not None and len(left) < len(order):
            schedule.keep_rounds(number, taken_s)
            order = [position for position in order if position in left]
    return times


@dataclass(slots=True)
class _Schedule:
    """When enough rounds were made; the fields are :func:`interleave`'s.

    Attributes:
        most_rounds: what the budget allowed when all candidates were timed; None as long as they all are.
    """

    rounds: int
    budget_s: float
    least: int
    least_s: float
    most_s: float
    is_settled: Callable[[list[list[int]]], bool]
    most_rounds: int | None = None

    def keep_rounds(self, number: int, taken_s: float) -> None:
        """Fix the number of rounds at what the budget allows for all candidates, when the first of them are left out."""
        if self.most_rounds is None:
            self.most_rounds = max(number, round(number * self.budget_s / max(taken_s, 1e-9)))

    def is_over(self, number: int, taken_s: float, times: list[list[int]]) -> bool:
        """Whether to end ahead of a round.

        Args:
            number: of rounds that were made.
            taken_s: seconds since the first began.
            times: of each candidate so far.
        """
        is_enough = taken_s > self.budget_s or (self.most_rounds is not None and number >= self.most_rounds)
        is_spent = number >= self.least and is_enough and (taken_s > self.most_s or self.is_settled(times))
        return taken_s >= self.least_s and (number >= self.rounds or is_spent)


class _Turns:
    """The turns of candidates: how many runs each has, and how long the last run took."""

    def __init__(
        self,
        candidates: Sequence[Callable[[], Any]],
        timed: Callable[[Callable[[], Any], Callable[[], object], int], list[int]],
        before: Callable[[], object],
        timer: HostTimer,
    ) -> None:
        self._candidates = candidates
        self._timed = timed
        self._before = before
        self._timer = timer
        self._runs: list[int] = []
        self._last_ns = 0

    def warm_up(self, turn_s: float, rest: float) -> None:
        """Run each candidate once, and find out how many of its runs fill a turn."""
        for candidate in self._candidates:
            self._before()
            candidate()
            if turn_s or rest:
                (self._last_ns,) = self._timed(candidate, self._before, 1)
            self._runs.append(max(1, round(turn_s * 1e9 / max(self._last_ns, 1))))

    def take(self, position: int, rest: float) -> int:
        """Time one turn of a candidate, after a rest or after untimed runs; returns its nanoseconds."""
        candidate, runs = self._candidates[position], self._runs[position]
        if rest:
            self._timer.rest(round(rest * self._last_ns))
        elif self._timer.method != CPU_TIME:  # no power limit makes a run depend on the run before it
            for _ in range(-(-runs // _UNTIMED)):
                self._before()
                candidate()
        self._last_ns = _middle_mean(self._timed(candidate, self._before, runs))
        return self._last_ns

    def of_round(self, positions: Sequence[int], rest: float, *, in_a_row: bool) -> Iterator[tuple[int, int]]:
        """Yield candidates in this order, each with the nanoseconds of its turn; ``in_a_row``: see :func:`interleave`."""
        if not in_a_row:
            yield from ((position, self.take(position, rest)) for position in positions)
            return
        self._before()
        self._candidates[positions[0]]()
        yield from zip(
            positions, _timed_on_device([self._candidates[position] for position in positions], self._before), strict=True
        )


def _timed_on_host(timer: HostTimer, call: Callable[[], Any], before: Callable[[], object], count: int) -> list[int]:
    times = []
    for _ in range(count):
        before()
        times.append(timer.time_ns(call))
    return times


def _repeated_on_device(call: Callable[[], Any], before: Callable[[], object], count: int) -> list[int]:
    return _timed_on_device([call] * count, before)


def _timed_on_device(calls: Sequence[Callable[[], Any]], before: Callable[[], object]) -> list[int]:
    """Time runs without waiting in between, so that none begins on an idle device."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]
    for (start, end), call in zip(events, calls, strict=True):
        before()
        start.record()
        call()
        end.record()
    events[-1][1].synchronize()
    return [round(start.elapsed_time(end) * 1e6) for start, end in events]


def _middle_mean(times_ns: Sequence[int]) -> int:
    """The mean without the lowest and the highest quarter: a median would tell less of a clock that swings."""
    cut = len(times_ns) // 4
    return round(statistics.fmean(sorted(times_ns)[cut : len(times_ns) - cut]))


def difference(before_ns: Sequence[int], after_ns: Sequence[int], confidence: float = 0.95) -> Difference:
    """Return the median of round-by-round differences and its interval, as ``timing.paired`` computes them."""
    found = compare_rounds(before_ns, after_ns, confidence)
    return Difference(median_ns=found.delta_ns, low_ns=found.low_ns, high_ns=found.high_ns)


def noise_ns(one_ns: Sequence[int], again_ns: Sequence[int], confidence: float = 0.95) -> int:
    """Return how far a candidate may differ from itself (A/A): the end of that difference's interval that lies farther from 0.

    One of the two may have been left out of later rounds: those that both have are compared.
    """
    count = min(len(one_ns), len(again_ns))
    same = difference(one_ns[:count], again_ns[:count], confidence)
    return max(abs(same.low_ns), abs(same.high_ns))


def is_quiet(share: float, confidence: float) -> Callable[[list[list[int]]], bool]:
    """Return the question whether the first two candidates, which are the same, differ by no more than a share of their time."""

    def found(times: list[list[int]]) -> bool:
        return noise_ns(times[0], times[1], confidence) <= share * median_interval(times[0])[0]

    return found


def compare_alone(
    before: Callable[[], Any],
    after: Callable[[], Any],
    *,
    on_cuda: bool,
    budget_s: float = 0.3,
    timer: HostTimer | None = None,
    record: Record = recorded,
) -> tuple[Timing, Timing]:
    """Time one chain's original ops against its kernel, each by itself, per call.

    On a GPU short ones are recorded up to twenty times into one graph, so that a microsecond kernel is not lost in the events'
    resolution. ``record`` does that.
    """
    timer = timer or step_timer(on_cuda=on_cuda)
    if on_cuda:
        once_ns = timer.agreed_ns(min(map(_once_on_device, (before, after))))
        repeats = max(1, min(_MOST_REPEATS, round(_REPEATED_NS / max(once_ns, 1))))
        pool = torch.cuda.graph_pool_handle()
        candidates = [record(call, pool=pool, repeats=repeats) for call in (before, after)]
    else:
        before()
        once_ns = max(timer.time_ns(before), 1)
        repeats = max(1, min(50, round(2e6 / once_ns)))
        candidates = [_repeat(call, repeats) for call in (before, after)]
    times = interleave(
        candidates, rounds=40, budget_s=budget_s, on_cuda=on_cuda, still_open=until_known_alone(on_cuda=on_cuda), timer=timer
    )
    method = "cuda_graph" if on_cuda else timer.method
    one, other = ([value // repeats for value in series] for series in times)
    return as_timing(one, method), as_timing(other, method)


def _once_on_device(call: Callable[[], Any]) -> int:
    """Return about how long a call takes, launches from Python included; it is warm afterwards."""
    call()
    return _timed_on_device([call], nothing)[0]


def _repeat(call: Callable[[], Any], repeats: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(repeats):
            call()

    return run
