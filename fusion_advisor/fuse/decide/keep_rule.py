"""Keep what pays: every rewrite is timed in the step that it changes, on top of the rewrites before it.

Cumulative prefixes of the rewrites are timed against each other in one interleaved run; the first prefix runs twice and gives
the noise floor (A/A). A rewrite stays when the whole interval of its paired difference lies below both thresholds. Rewrites
that a look at the first rounds settles are left out of the further ones (``timing.looks``), and so is the step itself once its
noise is below the least gain. Then the kept rewrites are timed together against none, which is the report's headline. Rewrites
that are faster by their whole interval but short of a threshold are timed once more together, against the same two thresholds.

On a GPU rewrites that are too little by their own times are one candidate, and next to nothing is left out (``alone``).

Where the power limit throttles the step, all of this is timed after rests (``timing.interleaving``). Both thresholds are
shares of the step that the rewrite is put on, because clock drift moves a long step by more. Figures:
``docs/measurements/keep_rule.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusion_advisor.fuse.decide.alone import each_of, is_longer_in_vain, judged, not_worth_the_step, pooled, total_of
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.decide.step_runner import Candidate, StepRunner, open_steps
from fusion_advisor.fuse.decide.step_runner import changes as changes_of
from fusion_advisor.fuse.decide.verdict import Verdict, is_small_gain, is_unclear, once_more, span_of, untimed, verdict_of
from fusion_advisor.records import Status, Timing
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.host_timer import HostTimer
from fusion_advisor.timing.known import until_precise
from fusion_advisor.timing.wall_timer import as_timing, median_interval

PATIENCE = 2.0
"""How many times longer than planned a step is timed that differs from itself by more than the least gain, or on a CPU by more
than 5 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Verdicts for all rewrites, and the step without and with the kept ones."""

    verdicts: dict[str, Verdict]
    noise_share: float
    before: Timing
    after: Timing
    method: str
    untouched_ns: int = 0
    """The step without any rewrite, in the run that timed each of them."""
    is_as_kept: bool = True
    """Whether ``after`` is the step with the kept rewrites and no others; if not, it is still to be confirmed."""


_LEAST_ROUNDS, _MOST_ROUNDS = 6, 200
_UNTIMED_ROUNDS = 6
"""Of a step whose rewrites stay whatever their time: enough for the report to show the step, before and after."""
_FEW_ROUNDS = 20
"""Of a step that has no rewrite to judge, for its time and its noise. The kept rewrites together have at least so many."""
_PRECISE, _TOLD = 0.001, 0.01
"""Shares of a step's time and of what two steps differ by. Once the median of each step is known to within the one, or their
difference to within the other, no further round is made."""


def keep_all(bench: Bench, candidates: Sequence[Candidate]) -> Decision:
    """Keep all candidates; the step without and with them is timed for the report, a few rounds of it.

    Args:
        bench: with every fusion installed.
        candidates: all of which have passed their checks.
    """
    runner = StepRunner(bench)
    times = interleaving.interleave(
        runner.calls([(), candidates]), rounds=_UNTIMED_ROUNDS, budget_s=0.0, on_cuda=bench.on_cuda,
        before=bench.live.written.rewind, timer=runner.timer,
    )  # fmt: skip
    runner.forget()
    before, after = (as_timing(side, runner.method) for side in times)
    verdicts = {candidate.id: untimed(candidate.id) for candidate in candidates}
    return Decision(
        verdicts=verdicts, noise_share=0.0, before=before, after=after, method=runner.method, untouched_ns=before.median_ns
    )


def decide(
    bench: Bench,
    candidates: Sequence[Candidate],
    *,
    min_gain: float,
    confidence: float,
    budget_s: float,
    note: Callable[[str], None] = lambda _: None,
    step: Callable[[int, int, str], None] = lambda *_: None,
    alone: Mapping[str, interleaving.Difference] | None = None,
    estimates: Callable[[], Mapping[str, interleaving.Difference]] = dict,
    given: Sequence[str] = (),
) -> Decision:
    """Time all candidates and decide.

    Args:
        bench: with every fusion installed.
        candidates: in the order that they are stacked; on a CPU the largest gain comes first.
        min_gain: share of the step that a rewrite must save.
        confidence: of the intervals.
        budget_s: seconds for the tournament, up to :data:`PATIENCE` times as many while the step differs too much from itself;
            small gains take as long again.
        note: gets a sentence on how the step is timed.
        step: given the rounds made, the rounds expected and what is timed.
        alone: what rewrites change by their chains' own times, in a step; asked where the step leaves a rewrite open, on a GPU
            only if no CUDA graph can hold the step.
        estimates: what rewrites change by themselves, in a step: asked before the step is timed, to leave out what can save next
            to nothing, and on a GPU to put together what is too little by itself.
        given: ids of graph passes that are in every step that is timed.
    """
    runner = StepRunner(bench, given)
    own = {**estimates(), **({} if bench.on_cuda else alone or {})}
    candidates, left_out = _arranged(runner, candidates, own, min_gain, budget_s)
    own = {**own, **{one.id: total_of(own, one) for one in candidates if one.parts}}

    def verdicts_by(times: Sequence[Sequence[int]]) -> dict[str, Verdict]:
        names, changes = [one.id for one in candidates], changes_of(times, min_gain, confidence, runner.rest(()))
        return judged(names, changes, {} if runner.method == "cuda_graph" else alone or {}, min_gain)

    times = _timed_prefixes(
        runner, candidates, min_gain=min_gain, confidence=confidence, budget_s=budget_s, note=note, step=step,
        is_in_vain=_is_in_vain(verdicts_by, own, confidence),
    )  # fmt: skip
    runner.forget()
    control, *stacked = times
    untouched_ns = median_interval(stacked[0])[0]
    noise_share = interleaving.noise_ns(control, stacked[0], confidence) / max(untouched_ns, 1)
    verdicts = _with_small_ones(
        runner, candidates, verdicts_by(times),
        step_ns=median_interval(stacked[-1])[0], min_gain=min_gain, confidence=confidence, budget_s=budget_s,
    )  # fmt: skip
    kept = [candidate for candidate in candidates if verdicts[candidate.id].status is Status.KEPT]
    before, after, is_as_kept = _together(runner, candidates, kept, times)
    each = {name: one for candidate in candidates for name, one in each_of(verdicts[candidate.id], candidate, own).items()}
    return Decision(
        verdicts={**each, **left_out}, noise_share=noise_share, before=before, after=after, method=runner.method,
        untouched_ns=round(untouched_ns), is_as_kept=is_as_kept,
    )  # fmt: skip


def _by_gain(candidates: Sequence[Candidate], alone: Mapping[str, interleaving.Difference]) -> list[Candidate]:
    """Put first what saves most by itself: so the kept ones are often one of the steps that are timed."""
    return sorted(candidates, key=lambda one: alone[one.id].median_ns if one.id in alone else 0)


def _together(
    runner: StepRunner, candidates: Sequence[Candidate], kept: Sequence[Candidate], times: Sequence[Sequence[int]]
) -> tuple[Timing, Timing, bool]:
    """Return the step without any rewrite and with the kept ones, and whether the second is just that.

    Further rewrites are tried on top, and what stays of all is timed at their end (:func:`confirmed`). Where the tournament did
    not time the kept ones without others, its fastest step stands for them until then: what must save a share of the step is not
    judged harder by it. On a CPU, where a step takes long, the end times nothing again that the tournament has timed.
    """
    control, *stacked = (as_timing(side, runner.method, rest=runner.rest(())) for side in times)
    if runner.on_cuda:
        return stacked[0], stacked[-1], True
    if list(kept) != list(candidates[: len(kept)]):
        return stacked[0], min(stacked, key=lambda one: one.median_ns), False
    return stacked[0], stacked[len(kept)] if kept else control, True


def _is_in_vain(
    verdicts_by: Callable[[Sequence[Sequence[int]]], Mapping[str, Verdict]],
    alone: Mapping[str, interleaving.Difference],
    confidence: float,
) -> Callable[[Sequence[Sequence[int]]], bool]:
    """Return the question whether further rounds would change no verdict; parameters as for :func:`decide`."""

    def found(times: Sequence[Sequence[int]]) -> bool:
        noise_ns = interleaving.noise_ns(times[0], times[1], confidence)
        return bool(alone) and is_longer_in_vain(verdicts_by(times).values(), alone, noise_ns=noise_ns, times_longer=PATIENCE)

    return found


def _timed_prefixes(
    runner: StepRunner,
    candidates: Sequence[Candidate],
    *,
    min_gain: float,
    confidence: float,
    budget_s: float,
    note: Callable[[str], None],
    step: Callable[[int, int, str], None],
    is_in_vain: Callable[[Sequence[Sequence[int]]], bool],
) -> list[list[int]]:
    """Time the step without rewrites twice, then with the first, with the first two, and so on; parameters as for :func:`decide`.

    ``is_in_vain`` says by the rounds so far whether further ones would change no verdict.

    Returns:
        Nanoseconds of each round, for each of these steps.
    """
    prefixes = [candidates[:count] for count in range(len(candidates) + 1)]
    calls = runner.calls([prefixes[0], *prefixes])
    note(f"{len(candidates)} rewrites, each timed in the step ({runner.method})")
    is_quiet, rest = runner.is_settled(min_gain, confidence), runner.rest([calls[0], calls[-1]])
    return interleaving.interleave(
        calls, rounds=_MOST_ROUNDS if candidates else _FEW_ROUNDS, budget_s=budget_s,
        most_s=PATIENCE * budget_s if candidates else 0.0, rest=rest, in_a_row=runner.in_a_row(rest),
        is_settled=lambda times: is_quiet(times) or is_in_vain(times), still_open=open_steps(min_gain, confidence, rest),
        on_cuda=runner.on_cuda, before=runner.rewind, timer=runner.timer,
        after=_shown(step, candidates, budget_s, runner.timer),
    )  # fmt: skip


def _timed_twice(
    runner: StepRunner, calls: Sequence[Callable[[], Any]], *, budget_s: float, rounds: int = 100
) -> tuple[Timing, Timing]:
    """Time two steps of a runner against each other, after rests where the power limit throttles them."""
    rest = runner.rest(calls)
    one, other = interleaving.interleave(
        calls, rounds=rounds, budget_s=budget_s, rest=rest, in_a_row=runner.in_a_row(rest),
        still_open=until_precise(_PRECISE, _FEW_ROUNDS, _TOLD),
        on_cuda=runner.on_cuda, before=runner.rewind, timer=runner.timer,
    )  # fmt: skip
    return as_timing(one, runner.method, rest=rest), as_timing(other, runner.method, rest=rest)


def _arranged(
    runner: StepRunner,
    candidates: Sequence[Candidate],
    own: Mapping[str, interleaving.Difference],
    min_gain: float,
    budget_s: float,
) -> tuple[list[Candidate], dict[str, Verdict]]:
    """Choose what the step is timed with; parameters as for :func:`decide`, ``own`` is what rewrites change by their own times.

    Returns:
        The candidates in order, and the verdicts on those that are left out.
    """
    step_ns = _step_ns(runner) if own else 0
    left_out = _left_out(runner, own, step_ns, min_gain, budget_s)
    worth = [candidate for candidate in candidates if candidate.id not in left_out]
    if not runner.on_cuda:
        return _by_gain(worth, own), left_out
    # Launched op by op, a step saves the host's time too, of which own times know nothing.
    is_replayed = runner.method == "cuda_graph"
    return pooled(worth, own, step_ns=step_ns, min_gain=min_gain) if is_replayed else worth, left_out


def _step_ns(runner: StepRunner) -> int:
    """Return about what the step takes: the lower of two runs, so that the least gain is not made larger by chance."""
    (times,) = interleaving.interleave(
        runner.calls([()]), rounds=2, least=2, budget_s=0.0, on_cuda=runner.on_cuda, before=runner.rewind, timer=runner.timer
    )
    return min(times)


def _left_out(
    runner: StepRunner, alone: Mapping[str, interleaving.Difference], step_ns: int, min_gain: float, budget_s: float
) -> dict[str, Verdict]:
    """Return the verdicts on what is not worth timing in the step; parameters as for :func:`decide`."""
    if not alone or runner.method == "cuda_events":  # launched op by op, a step saves the host's time too
        return {}
    turns = budget_s * 1e9 / max(step_ns, 1)
    rounds = round(max(_LEAST_ROUNDS, min(_MOST_ROUNDS, turns / (len(alone) + 2))))
    if runner.on_cuda:
        return not_worth_the_step(alone, step_ns=step_ns, min_gain=min_gain, rounds=rounds, round_noise=0.0)
    return not_worth_the_step(alone, step_ns=step_ns, min_gain=min_gain, rounds=rounds)


def _shown(
    step: Callable[[int, int, str], None], candidates: Sequence[Candidate], budget_s: float, timer: HostTimer
) -> Callable[[int, int, int], None]:
    """Return a callback that shows each round as it begins: what is timed, how many rounds remain."""
    started, turns = timer.seconds(), len(candidates) + 2
    names = ", ".join(candidate.id for candidate in candidates)
    seen = [0]

    def after(number: int, _position: int, _last_ns: int) -> None:
        seen[0] += 1
        taken_s = max(timer.seconds() - started, 1e-9)
        rounds = max(_LEAST_ROUNDS, min(_MOST_ROUNDS, round((number + 1) * budget_s / taken_s)))
        step(seen[0], max(rounds, number + 1) * turns, f"{names}: round {number + 1} of about {max(rounds, number + 1)}")

    return after


def _with_small_ones(
    runner: StepRunner,
    candidates: Sequence[Candidate],
    verdicts: dict[str, Verdict],
    *,
    step_ns: float,
    min_gain: float,
    confidence: float,
    budget_s: float,
) -> dict[str, Verdict]:
    """Judge together what is faster by its whole interval and too little to be kept by itself, unless all of it is too little."""
    kept = [candidate for candidate in candidates if verdicts[candidate.id].status is Status.KEPT]
    small = [candidate for candidate in candidates if is_small_gain(verdicts[candidate.id])]
    if -sum(verdicts[candidate.id].delta_ns for candidate in small) <= min_gain * step_ns:
        return verdicts
    all_of_them = [candidate for candidate in candidates if candidate in kept or candidate in small]
    before, after = runner.plain(kept), runner.plain(all_of_them)
    if runner.on_cuda:
        budget_s /= 4  # a sum close to the least gain is settled by no look, and takes all of it
    joint, _ = _once_on_top(runner, before, after, "", min_gain=min_gain, confidence=confidence, budget_s=budget_s)
    names = [candidate.id for candidate in small]
    if len(small) == 1:  # the second run is of it alone, so that its figures are that rewrite's own
        return {**verdicts, names[0]: once_more(verdicts[names[0]], joint)}
    changed = {}
    for candidate in small:
        own, others = verdicts[candidate.id], ", ".join(name for name in names if name != candidate.id)
        little = f"{span_of(own.delta_ns, own.interval_ns)}, too little by itself"
        # Each was faster by itself: where all of them are slower, none of them is known to be.
        status = {Status.KEPT: Status.KEPT, Status.SLOWER: Status.WITHIN_NOISE}.get(joint.status, own.status)
        changed[candidate.id] = replace(own, status=status, reason=f"{little}; together with {others}: {joint.reason}")
    return {**verdicts, **changed}


def on_top(
    runner: StepRunner,
    before: Callable[[], Any],
    after: Callable[[], Any],
    *,
    name: str,
    min_gain: float,
    confidence: float,
    budget_s: float,
    is_timed: bool = True,
) -> Verdict:
    """Time a step against the same step with one more rewrite, and decide; for longer once more where it is too little to tell.

    Args:
        runner: of the step.
        before: the step with all that was kept.
        after: with the rewrite on top.
        name: of the rewrite.
        min_gain: share of the step that it must save.
        confidence: of the interval.
        budget_s: seconds; twice as many for the second run.
        is_timed: False keeps it as it is.
    """
    if not is_timed:
        return untimed(name)
    first, step_ns = _once_on_top(runner, before, after, name, min_gain=min_gain, confidence=confidence, budget_s=budget_s)
    if not is_unclear(first, step_ns, min_gain):
        return first
    second, _ = _once_on_top(runner, before, after, name, min_gain=min_gain, confidence=confidence, budget_s=2 * budget_s)
    return once_more(first, second)


def _once_on_top(
    runner: StepRunner,
    before: Callable[[], Any],
    after: Callable[[], Any],
    name: str,
    *,
    min_gain: float,
    confidence: float,
    budget_s: float,
) -> tuple[Verdict, float]:
    """Return the verdict of one run, and the step without the rewrite."""
    calls = runner.recorded([before, before, after])
    rest = runner.rest(calls[-1:])
    times = interleaving.interleave(
        calls, rounds=_MOST_ROUNDS, budget_s=budget_s, most_s=PATIENCE * budget_s,
        rest=rest, in_a_row=runner.in_a_row(rest), is_settled=runner.is_settled(min_gain, confidence),
        still_open=open_steps(min_gain, confidence, rest), on_cuda=runner.on_cuda, before=runner.rewind, timer=runner.timer,
    )  # fmt: skip
    del calls
    runner.forget()
    (one,) = changes_of(times, min_gain, confidence, rest)
    return verdict_of(name, one.change, step_ns=one.step_ns, noise_ns=one.noise_ns, min_gain=min_gain), one.step_ns


def confirmed(
    runner: StepRunner, decision: Decision, original: Callable[[], Any], after: Callable[[], Any], *, budget_s: float
) -> Decision:
    """Time the step as it is now against the step without any rewrite; returns the decision with the new figures."""
    without, with_all = _timed_twice(runner, runner.recorded([original, after]), budget_s=budget_s)
    return replace(decision, before=without, after=with_all, method=runner.method, is_as_kept=True)
