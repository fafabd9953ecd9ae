"""On a CPU a step's noise may hide a gain that the chain shows by itself, in many short runs that no neighbour disturbs.

A chain of a millisecond is timed between two of the scheduler's slices; a step of 300 ms never is. So a rewrite that the step
can neither confirm nor refute is judged by its chain's own times, once for each run in the step. Figures:
``docs/measurements/cpu_clock.md``.

On a GPU the step shows gains of a thousandth, and a rewrite whose own times leave it less than the least gain would be timed
until the budget ends. Such rewrites are put on the step together, as one. Figures: ``docs/measurements/keep_rule.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fusion_advisor import units
from fusion_advisor.fuse.decide.step_runner import Candidate
from fusion_advisor.fuse.decide.verdict import Verdict, verdict_of
from fusion_advisor.records import Chain, Fusion, Status, Timing
from fusion_advisor.timing.interleaving import Difference, difference
from fusion_advisor.timing.looks import Change


def savings_alone(fusions: Iterable[Fusion], runs: Mapping[str, int], confidence: float) -> dict[str, Difference]:
    """Return what each fusion changes by its chain's own times, in all its runs of a step.

    Args:
        fusions: those that were timed alone are judged.
        runs: how often a step runs each chain, by the chain's id.
        confidence: level of the intervals.
    """
    found = {}
    for fusion in fusions:
        if fusion.chain_before is None or fusion.chain_after is None:
            continue
        times, once = runs[fusion.chain_id], difference(fusion.chain_before.times_ns, fusion.chain_after.times_ns, confidence)
        found[fusion.id] = Difference(median_ns=once.median_ns * times, low_ns=once.low_ns * times, high_ns=once.high_ns * times)
    return found


_OF_CACHE, _OF_MEMORY = 16, 1.5
"""How many times quicker than the measured copy bandwidth a chain's bytes may move: from a cache, and where none holds them."""
_CACHE_FACTOR = 3


def why_implausible(chain: Chain, before: Timing, after: Timing, *, cache_bytes: int) -> str:
    """Say why a chain's own times cannot be right: a scheduler's slice makes 7.96 µs of 8.00 ms; empty where they may be.

    Args:
        chain: with its floor by the measured bandwidth, and what it takes of the step.
        before: its original ops, once.
        after: its kernel, once.
        cache_bytes: of the device's last-level cache, in which what runs again and again may lie.
    """
    runs = max(chain.runs, 1)
    step_ns = chain.device_ns / chain.share if chain.share else math.inf
    if before.median_ns * runs > step_ns:
        took = f"the original ops took {units.duration(before.median_ns)} at each of {runs} runs"
        return f"{took}, more than the whole step ({units.duration(step_ns)})"
    is_past_cache = chain.floor_bytes / runs > _CACHE_FACTOR * cache_bytes
    least_ns = chain.floor_ns / runs / (_OF_MEMORY if is_past_cache else _OF_CACHE)
    for name, timing in (("the original ops", before), ("the kernel", after)):
        if timing.median_ns < least_ns:
            moved = f"{chain.floor_bytes // runs:,} bytes"
            return f"{name} took {units.duration(timing.median_ns)}, in which this device cannot move {moved}"
    return ""


_IN_STEP = 2.0
"""How many times more than by itself a rewrite may save in the step, where what it does not write leaves the cache to others.
Estimates missed by 3 to 14 % (``docs/measured.md``)."""
_SHARE = 0.5
"""Of the least gain: what is left out saves less than that together, so that it decides about no small gains either."""
_ROUND_NOISE = 0.05
"""Of a step: by how much one differs from itself at best, in one round on a CPU; n rounds divide it by the root of n. Eight
rounds of GPT-2 differed by 2.3 % in the quietest of ten runs (``docs/measurements/first_minutes.md``)."""


def pooled(
    candidates: Sequence[Candidate], alone: Mapping[str, Difference], *, step_ns: float, min_gain: float
) -> list[Candidate]:
    """Put rewrites that are too little by themselves together, at the end; they are what is left to gain by then.

    Args:
        candidates: in the order that they are stacked.
        alone: what rewrites change by their own times, in a step; one without is timed by itself.
        step_ns: the step.
        min_gain: share of the step that a rewrite must save.
    """
    left_ns = step_ns + sum(alone[one.id].median_ns for one in candidates if one.id in alone)
    little = [one for one in candidates if one.id in alone and -alone[one.id].low_ns < min_gain * left_ns]
    if len(little) < 2:
        return list(candidates)
    together = Candidate(id=", ".join(one.id for one in little), parts=tuple(little))
    return [*(one for one in candidates if one not in little), together]


def total_of(alone: Mapping[str, Difference], candidate: Candidate) -> Difference:
    """Return what all rewrites of a candidate change by their own times, in a step."""
    each = [alone[one.id] for one in candidate.rewrites]
    median_ns, low_ns, high_ns = (
        sum(ends) for ends in zip(*((one.median_ns, one.low_ns, one.high_ns) for one in each), strict=True)
    )
    return Difference(median_ns=median_ns, low_ns=low_ns, high_ns=high_ns)


def each_of(verdict: Verdict, candidate: Candidate, alone: Mapping[str, Difference]) -> dict[str, Verdict]:
    """Return the verdict on each rewrite of a candidate: what all of them change, divided by what each saves by its own times.

    Args:
        verdict: on the candidate.
        candidate: one rewrite or several.
        alone: what rewrites change by their own times, in a step.
    """
    if not candidate.parts:
        return {candidate.id: verdict}
    # Each is faster by itself: where all of them are slower, none of them is known to be.
    status = Status.WITHIN_NOISE if verdict.status is Status.SLOWER else verdict.status
    total_ns = total_of(alone, candidate).median_ns
    found = {}
    for one in candidate.parts:
        own_ns, others = alone[one.id].median_ns, ", ".join(other.id for other in candidate.parts if other is not one)
        share = own_ns / total_ns if total_ns else 1 / len(candidate.parts)
        low_ns, high_ns = (round(share * end_ns) for end_ns in verdict.interval_ns)
        reason = (
            f"by its own times {units.delta(own_ns)} per step, too little by itself; together with {others}: {verdict.reason}"
        )
        found[one.id] = replace(
            verdict,
            id=one.id,
            status=status,
            reason=reason,
            delta_ns=round(share * verdict.delta_ns),
            interval_ns=(low_ns, high_ns),
            timed_with=tuple(other.id for other in candidate.parts if other is not one),
        )
    return found


def not_worth_the_step(
    alone: Mapping[str, Difference], *, step_ns: float, min_gain: float, rounds: int, round_noise: float = _ROUND_NOISE
) -> dict[str, Verdict]:
    """Return the verdicts on rewrites that need not be timed in the step.

    Some save next to nothing, all of them together. Others are below the least gain by themselves, and even twice their saving
    would be lost in the step's noise.

    Args:
        alone: what rewrites change by themselves, in all their runs of a step.
        step_ns: the step; a low figure, so that the least gain is not made larger by chance.
        min_gain: share of the step that a rewrite must save.
        rounds: of the step that there is time for.
        round_noise: share of the step by which one differs from itself in one round.
    """
    found: dict[str, Verdict] = {}
    room_ns, noise_ns = _SHARE * min_gain * step_ns, round_noise * step_ns / math.sqrt(rounds)
    for name, change in sorted(alone.items(), key=lambda item: -item[1].low_ns):
        most_ns = max(0.0, -_IN_STEP * change.low_ns)
        if most_ns <= room_ns:
            room_ns -= most_ns
            why = "far from"
        elif min_gain and most_ns <= noise_ns and change.high_ns >= -min_gain * step_ns:
            why = f"hidden by a step's noise of {units.duration(noise_ns)} at best, and not past"
        else:
            continue
        found[name] = _too_little_alone(name, change, why, step_ns=step_ns, min_gain=min_gain)
    return found


def _too_little_alone(name: str, change: Difference, why: str, *, step_ns: float, min_gain: float) -> Verdict:
    span = (change.low_ns, change.high_ns)
    reason = (
        f"by itself {units.delta(change.median_ns)} {units.delta_interval(*span)} per step, {why} the threshold of "
        f"{units.delta(-min_gain * step_ns)}; the step was not timed with it"
    )
    return Verdict(
        id=name, status=Status.TOO_LITTLE, reason=reason, delta_ns=change.median_ns, interval_ns=span, is_timed_alone=True
    )


def far_too_little(name: str, alone: Difference | None, *, step_ns: float, min_gain: float) -> Verdict | None:
    """Return the verdict on a rewrite of which even twice the saving is below the least gain; None where the step decides.

    Eleven of twelve kernels of linears in a Flux, an UNet and two ConvNets saved at most twice what they saved by themselves; the
    twelfth saved 6 µs where 35 were asked for. The step took 3 to 9 s to show it of each.

    Args:
        name: of the rewrite.
        alone: what it changes by itself, in a step; None where that is not known.
        step_ns: the step.
        min_gain: share of the step that it must save.
    """
    if alone is None or -_IN_STEP * alone.low_ns >= min_gain * step_ns:
        return None
    verdict = _too_little_alone(name, alone, "far from", step_ns=step_ns, min_gain=min_gain)
    return replace(verdict, status=Status.SLOWER) if alone.low_ns > 0 else verdict


def judged_alone(verdict: Verdict, alone: Difference | None, *, step_ns: float, min_gain: float) -> Verdict:
    """Return the verdict on a rewrite that the step left open, by its chain's own times; any other verdict stays.

    Args:
        verdict: from the step.
        alone: what the chain's own times say; None where it was not timed.
        step_ns: the step without the rewrite.
        min_gain: share of the step that it must save.
    """
    is_open = verdict.status in (Status.WITHIN_NOISE, Status.TOO_LITTLE) and verdict.interval_ns[0] < 0
    if alone is None or not is_open or alone.high_ns >= -min_gain * step_ns:
        return verdict
    reason = (
        f"by its chain's own times {units.delta(alone.median_ns)} {units.delta_interval(alone.low_ns, alone.high_ns)} per step, "
        f"past the threshold of {units.delta(-min_gain * step_ns)}; the step's noise hides it ({verdict.reason})"
    )
    return replace(
        verdict,
        status=Status.KEPT,
        reason=reason,
        delta_ns=alone.median_ns,
        interval_ns=(alone.low_ns, alone.high_ns),
        is_timed_alone=True,
    )


def judged(
    names: Iterable[str], changes: Iterable[Change], alone: Mapping[str, Difference], min_gain: float
) -> dict[str, Verdict]:
    """Return the verdict on each rewrite, by the step or, where that leaves it open, by its chain's own times.

    Args:
        names: of the rewrites, in the order that they are stacked.
        changes: of the step, by each.
        alone: what rewrites change by their chains' own times, in a step.
        min_gain: share of the step that a rewrite must save.
    """
    found = {}
    for name, one in zip(names, changes, strict=True):
        by_step = verdict_of(name, one.change, step_ns=one.step_ns, noise_ns=one.noise_ns, min_gain=min_gain)
        found[name] = judged_alone(by_step, alone.get(name), step_ns=one.step_ns, min_gain=min_gain)
    return found


def is_longer_in_vain(
    verdicts: Iterable[Verdict], alone: Mapping[str, Difference], *, noise_ns: float, times_longer: float
) -> bool:
    """Say whether timing the step for longer would confirm none of the rewrites that are not kept by now.

    The noise of a median falls with the root of the rounds. So a rewrite that saves less by itself, twice over, than the noise
    that would be left is not worth the rounds.

    Args:
        verdicts: by the rounds so far.
        alone: what rewrites change by themselves, in all their runs of a step.
        noise_ns: how far the step differs from itself by now.
        times_longer: how many times as long it would be timed.
    """
    left_ns = noise_ns / math.sqrt(times_longer)
    open_ids = [verdict.id for verdict in verdicts if verdict.status is not Status.KEPT]
    return all(name in alone and -_IN_STEP * alone[name].low_ns < left_ns for name in open_ids)
