"""The keep rule of ``--quick``: rewrites are chosen by their own times, and go only where all of them make the step slower.

There is no A/A: nothing is known of how far the step differs from itself, and the report says so. Qwen2.5-7B, 1 x 512, spends
most of its time on such proofs (``docs/measurements/keep_rule.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusion_advisor import units
from fusion_advisor.fuse.decide.keep_rule import Decision
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.decide.step_runner import Candidate, StepRunner
from fusion_advisor.fuse.decide.verdict import Verdict, span_of, untimed, verdict_of
from fusion_advisor.records import Status
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.wall_timer import as_timing, median_interval

_ROUNDS = 20
_BUDGET_S = 2.0
UNPROVEN = "--quick: no A/A shows how far the step differs from itself"


def decide_quickly(
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
    """Keep what saves time by its own times: all of it together more than the least gain, by these times or in the step.

    The arguments are those of :func:`fusion_advisor.fuse.decide.keep_rule.decide`; ``min_gain`` is asked of all together. Nothing
    stays where the step is slower with all of it.
    """
    runner = StepRunner(bench, given)
    own = {**(alone or {}), **estimates()}
    chosen = [one for one in candidates if one.id not in own or own[one.id].median_ns < 0]
    calls = runner.calls([(), chosen])
    note(f"{len(chosen)} rewrites chosen by their own times; the step is timed with all of them ({runner.method})")
    step(0, 1, "all of them against none")
    without, with_all = interleaving.interleave(
        calls, rounds=_ROUNDS, budget_s=min(budget_s, _BUDGET_S), rest=runner.rest(calls), on_cuda=runner.on_cuda,
        before=runner.rewind, timer=runner.timer,
    )  # fmt: skip
    change = interleaving.difference(without, with_all, confidence)
    step_ns = median_interval(without)[0]
    together = verdict_of("", change, step_ns=step_ns, noise_ns=0, min_gain=min_gain)
    if together.status is not Status.SLOWER and sum(own[one.id].high_ns for one in chosen if one.id in own) < -min_gain * step_ns:
        together = replace(together, status=Status.KEPT)
    rest = runner.rest(calls)
    before, after = (as_timing(side, runner.method, rest=rest) for side in (without, with_all))
    runner.forget()
    return Decision(
        verdicts={one.id: _verdict(one.id, own.get(one.id), together if one in chosen else None) for one in candidates},
        noise_share=0.0, before=before, after=after if together.status is Status.KEPT else before, method=runner.method,
        untouched_ns=round(step_ns),
    )  # fmt: skip


def on_top_quickly(
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
    """Time a step against the same step with one more rewrite, for a moment.

    The arguments are those of :func:`fusion_advisor.fuse.decide.keep_rule.on_top`.
    """
    if not is_timed:
        return untimed(name)
    calls = runner.recorded([before, after])
    one, other = interleaving.interleave(
        calls, rounds=_ROUNDS, budget_s=min(budget_s, _BUDGET_S / 2), rest=runner.rest(calls[-1:]), on_cuda=runner.on_cuda,
        before=runner.rewind, timer=runner.timer,
    )  # fmt: skip
    del calls
    runner.forget()
    change = interleaving.difference(one, other, confidence)
    found = verdict_of(name, change, step_ns=median_interval(one)[0], noise_ns=0, min_gain=min_gain)
    return replace(found, reason=f"{found.reason} ({UNPROVEN})")


def _verdict(name: str, own: interleaving.Difference | None, together: Verdict | None) -> Verdict:
    """Return the verdict on one rewrite.

    Args:
        name: of the rewrite.
        own: what it changes by its own times, in a step; None where nobody timed it by itself.
        together: that on all that were chosen; None where it was not.
    """
    little = "not timed by itself" if own is None else f"by its own times {units.delta(own.median_ns)} per step"
    if together is None:
        status, reason = Status.WITHIN_NOISE, f"{little}; the step was not timed with it ({UNPROVEN})"
    else:
        span = span_of(together.delta_ns, together.interval_ns)
        status, reason = together.status, f"{little}; with all others that were chosen so: {span} ({UNPROVEN})"
    return Verdict(id=name, status=status, reason=reason, delta_ns=0, interval_ns=(0, 0), is_timed=False)
