"""Turns sets of rewrites into calls of the step, and says when their times decide."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.codegen.cuda.graph_memsets import Memsets
from fusion_advisor.fuse.decide.session import Bench, BuiltFusion
from fusion_advisor.fuse.decide.verdict import verdict_of
from fusion_advisor.records import Status
from fusion_advisor.runtime.torch_internals import cuda_state
from fusion_advisor.timing import interleaving, looks
from fusion_advisor.timing.clock_sampler import is_held_down

_CPU_NOISE = 0.05
"""Of the step. On a busy machine ten rounds differed by 6 to 9 %, twenty by 3 to 6 % (``docs/measurements/cpu_clock.md``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is put on the step at once, in the order of trying: a graph pass, a fusion, or several of them.

    Attributes:
        id: of the rewrite, or of all of them.
        graph_pass: id of a pass; empty where it is none.
        fusion: a built one; None where it is none.
        parts: rewrites that are timed together, each too little by itself.
    """

    id: str
    graph_pass: str = ""
    fusion: BuiltFusion | None = None
    parts: tuple[Candidate, ...] = ()

    @property
    def rewrites(self) -> tuple[Candidate, ...]:
        """The single rewrites."""
        return self.parts or (self,)


class StepRunner:
    """Turns sets of rewrites into calls of the step: CUDA graph replays where the step can be recorded.

    Attributes:
        timer: for steps that are timed from the host's side.
        method: ``cuda_graph``, ``cuda_events``, ``cpu_time`` or ``wall``: how the calls made so far must be timed.

    Args:
        bench: of the step.
        given: ids of graph passes that every set has.
    """

    def __init__(self, bench: Bench, given: Sequence[str] = ()) -> None:
        self._bench = bench
        self._given = tuple(given)
        self.on_cuda = bench.on_cuda
        self.rewind = bench.live.written.rewind
        self._pool = torch.cuda.graph_pool_handle() if bench.on_cuda else None
        self.timer = bench.timer
        self.method = bench.timer.method
        if bench.on_cuda:
            self.method = "cuda_events" if bench.recorder is None else "cuda_graph"
        self._memsets = Memsets()

    def calls(self, sets: Sequence[Sequence[Candidate]]) -> list[Callable[[], Any]]:
        """Return one call per set of rewrites; a set that comes again (the step against itself) is built once."""
        made: dict[tuple[int, ...], Callable[[], Any]] = {}
        for chosen in sets:
            key = tuple(map(id, chosen))
            if key not in made:
                made[key] = self.plain(chosen)
        return self.recorded([made[tuple(map(id, chosen))] for chosen in sets])

    def plain(self, chosen: Sequence[Candidate]) -> Callable[[], Any]:
        """Return the step with a set of rewrites, launched one by one."""
        single = [one for candidate in chosen for one in candidate.rewrites]
        fusions = [one.fusion for one in single if one.fusion is not None]
        passes = [*self._given, *(one.graph_pass for one in single if one.graph_pass)]
        variant = self._bench.build(fusions, passes) if fusions else self._bench.with_passes(passes)
        return lambda: self._bench.run(variant)

    def recorded(self, plain: list[Callable[[], Any]]) -> list[Callable[[], Any]]:
        """Return replays of steps, or the steps themselves where one cannot be recorded."""
        record = self._bench.recorder if self.method == "cuda_graph" else None
        if record is None:
            return plain
        try:
            around = cuda_state.own_gemm_workspace
            finish = self._memsets.replace  # as the fused model's own graph is recorded
            return [
                record(call, pool=self._pool, before=self.rewind, around=around, finish=finish, is_warm=is_warm)
                for call, is_warm in zip(plain, come_again(plain), strict=True)
            ]
        except interleaving.CannotRecord:
            self.method = "cuda_events"
            return plain

    def rest(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Return how long the device rests between timed runs; calls of a bench are looked at once, the first time it is asked.

        Args:
            calls: made by this runner; one that the power limit holds down is enough.
        """
        if self._bench.rest is None:
            self._bench.rest = interleaving.REST if is_held_down(calls, on_cuda=self.on_cuda, before=self.rewind) else 0.0
        return self._bench.rest

    def in_a_row(self, rest: float) -> bool:
        """Return whether a round's runs may follow one another: they are replays, and no power limit sets their clock.

        Args:
            rest: that :meth:`rest` returned.
        """
        return self.method == "cuda_graph" and not rest

    def is_settled(self, min_gain: float, confidence: float) -> Callable[[list[list[int]]], bool]:
        """Return whether the step differs so little from itself that no further time is worth it."""
        return interleaving.is_quiet(min_gain if self.on_cuda else max(min_gain, _CPU_NOISE), confidence)

    def forget(self) -> None:
        """Free the graphs of the tournament before the confirmation records its own."""
        if self._bench.on_cuda:
            self._pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()


def come_again(calls: Sequence[Callable[[], Any]]) -> list[bool]:
    """Return for each call whether the same one stands before it: the step that is timed against itself."""
    seen: set[int] = set()
    found = []
    for call in calls:
        found.append(id(call) in seen)
        seen.add(id(call))
    return found


def open_steps(
    min_gain: float, confidence: float, rest: float = 0.0
) -> Callable[[Sequence[Sequence[int]]], Collection[int] | None]:
    """Return what says which steps are timed further, at a look (``timing.looks``): none once all rewrites are decided.

    Else the steps without and with each rewrite that the looks leave open, and for as long as its noise may decide the step
    itself, twice. Once the noise is below the least gain, even by a look's strict interval, a rewrite must pass that gain alone.

    Args:
        min_gain: share of the step that a rewrite must save.
        confidence: of all verdicts.
        rest: idle time ahead of each run, as a multiple of the run before it.
    """

    def found(times: Sequence[Sequence[int]]) -> Collection[int] | None:
        seen = looks.at_look(times, confidence, lambda one: settles(one, min_gain), rest=rest)
        if not seen:
            return None
        if is_clear(seen, min_gain):
            return ()
        left = {number: one for number, one in enumerate(seen) if not settles(one, min_gain)}
        is_loud = any(one.noise_ns >= min_gain * one.step_ns for one in left.values())
        return {position for number in left for position in (number + 1, number + 2)} | ({0, 1} if is_loud else set())

    return found


def changes(times: Sequence[Sequence[int]], min_gain: float, confidence: float, rest: float = 0.0) -> tuple[looks.Change, ...]:
    """Return what each rewrite changes, by rounds that may have ended at a look; the arguments are :func:`open_steps`'s."""
    return looks.changes(times, confidence, lambda one: settles(one, min_gain), lambda seen: is_clear(seen, min_gain), rest=rest)


def settles(seen: looks.Change, min_gain: float) -> bool:
    """Whether a rewrite is kept, or is no gain of the least share and certainly one or none: further rounds change neither."""
    return _is_kept(seen, min_gain) or (_most(seen, min_gain) < 1 and _has_sign(seen))


def is_clear(seen: Sequence[looks.Change], min_gain: float) -> bool:
    """Whether each rewrite is kept, or is no gain of the least share, and what others there are need no longer look together."""
    left = [one for one in seen if not _is_kept(one, min_gain)]
    most = [_most(one, min_gain) for one in left]
    has_signs = all(map(_has_sign, left))
    return bool(seen) and all(share < 1 for share in most) and (has_signs or sum(max(share, 0) for share in most) < 1)


def _is_kept(seen: looks.Change, min_gain: float) -> bool:
    verdict = verdict_of("", seen.change, step_ns=seen.step_ns, noise_ns=seen.noise_ns, min_gain=min_gain)
    return verdict.status is Status.KEPT


def _most(seen: looks.Change, min_gain: float) -> float:
    """The largest gain that the interval leaves, as a multiple of the least gain."""
    return -seen.change.low_ns / (min_gain * seen.step_ns) if min_gain else 1.0


def _has_sign(seen: looks.Change) -> bool:
    return seen.change.high_ns < 0 or seen.change.low_ns >= 0
