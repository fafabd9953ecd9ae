"""The keep rule on a simulated machine: noise is noise, a planted gain stays, a planted loss goes."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from fusion_advisor import units
from fusion_advisor.capture.graph.tracer import LiveCapture
from fusion_advisor.fuse.decide import step_runner
from fusion_advisor.fuse.decide.keep_rule import decide, on_top
from fusion_advisor.fuse.decide.step_runner import Candidate, StepRunner
from fusion_advisor.records import Status
from fusion_advisor.timing import interleaving

STEP_NS = 1_000_000


class Machine:
    """A bench whose step takes what its rewrites leave, with noise, a drift, and outliers."""

    on_cuda = False
    rest = None

    def __init__(self, clock, effects, *, noise=0.01, seed=0):
        self.clock, self.effects, self.noise = clock, effects, noise
        self.timer = clock
        self.random = random.Random(seed)
        self.runs = 0
        self.live = LiveCapture()

    def build(self, fusions, passes):
        return (*passes, *(fusion.name for fusion in fusions))

    def with_passes(self, passes):
        return self.build((), passes)

    def run(self, variant):
        self.runs += 1
        effects = (self.effects[name] for name in variant)
        cost = STEP_NS + sum(effect(variant) if callable(effect) else effect for effect in effects)
        cost *= self.random.gauss(1.0, self.noise) + 0.05 * (self.runs % 400 < 200)
        if self.random.random() < 0.03:
            cost *= 1.5
        self.clock.now_ns += int(cost)


def candidates(effects):
    return [Candidate(id=name, fusion=SimpleNamespace(name=name)) for name in effects]


def decided(clock, effects, **options):
    machine = Machine(clock, effects, **{key: options.pop(key) for key in ("noise", "seed") if key in options})
    options = {"min_gain": 0.005, "confidence": 0.95, "budget_s": 1.0} | options
    return decide(machine, candidates(effects), **options)


@pytest.mark.parametrize("noise", [0.002, 0.02])
def test_a_rewrite_that_does_nothing_is_within_noise(clock, noise):
    found = [
        verdict.status
        for seed in range(60)
        for verdict in decided(clock, {"a": 0, "b": 0, "c": 0}, seed=seed, noise=noise).verdicts.values()
    ]
    assert found.count(Status.WITHIN_NOISE) >= 0.95 * len(found)


def test_a_planted_gain_is_kept_and_a_planted_loss_is_slower(clock):
    for seed in range(20):
        found = decided(clock, {"fast": -60_000, "none": 0, "slow": 60_000, "fast2": -80_000}, seed=seed)
        status = {name: verdict.status for name, verdict in found.verdicts.items()}
        assert status == {
            "fast": Status.KEPT, "none": status["none"], "slow": Status.SLOWER, "fast2": Status.KEPT,
        }  # fmt: skip
        assert status["none"] is not Status.KEPT
        assert found.verdicts["fast"].delta_ns == pytest.approx(-60_000, rel=0.3)


def test_the_confirmation_is_of_the_kept_ones_against_none(clock):
    found = decided(clock, {"fast": -100_000, "slow": 200_000}, noise=0.001)
    gain = found.before.median_ns - found.after.median_ns
    assert gain == pytest.approx(100_000, rel=0.3)
    assert found.method == found.before.method == "wall"


def test_a_gain_below_the_threshold_is_not_kept(clock):
    (verdict,) = decided(clock, {"small": -3_000}, noise=0.0001, min_gain=0.01).verdicts.values()
    assert verdict.status is Status.TOO_LITTLE
    assert "not past the threshold" in verdict.reason


def test_a_gain_within_the_noise_is_not_kept(clock):
    for seed in range(20):
        (verdict,) = decided(clock, {"small": -3_000}, noise=0.1, seed=seed, min_gain=0.0).verdicts.values()
        assert verdict.status is not Status.KEPT


def test_noise_is_that_of_the_step_that_a_rewrite_is_put_on(clock):
    effects = {"mask": -900_000, "gelu": -4_000}
    kept = [decided(clock, effects, noise=0.02, seed=seed).verdicts["gelu"].status is Status.KEPT for seed in range(20)]
    noise_ns = [decided(clock, effects, noise=0.02, seed=seed).noise_share * STEP_NS for seed in range(20)]
    assert sum(kept) >= 18
    assert sorted(noise_ns)[10] > 4_000  # of the untouched step: more than what it saves


@pytest.mark.parametrize("is_held", [True, False])
def test_where_the_power_limit_holds_a_step_down_all_is_timed_after_rests(clock, monkeypatch, is_held):
    rests = []
    monkeypatch.setattr(step_runner, "is_held_down", lambda calls, **_: is_held and len(calls) == 2)
    clock.rest = rests.append
    decision = decided(clock, {"gain": -50_000, "little": -4_000}, noise=0.001)
    assert decision.verdicts["gain"].status is Status.KEPT
    assert decision.before.rest == decision.after.rest == (interleaving.REST if is_held else 0.0)
    assert bool(rests) == is_held and all(rest > 1.5 * STEP_NS for rest in rests)


def test_rests_are_part_of_the_time_that_a_look_waits_for(clock):
    """Ten rounds of three steps of a millisecond are half a second with rests 17 times as long."""
    machine = Machine(clock, {"a": -100_000}, noise=0.0001, seed=2)
    machine.rest = 17.0
    verdict = on_top(
        StepRunner(machine), lambda: machine.run(()), lambda: machine.run(("a",)),
        name="a", min_gain=0.005, confidence=0.95, budget_s=10.0,
    )  # fmt: skip
    assert verdict.status is Status.KEPT
    assert machine.runs == 2 * 3 + 10 * 3, "each step ran twice ahead of the rounds"


def test_nothing_to_try_is_decided_too(clock):
    found = decided(clock, {})
    assert found.verdicts == {}
    assert 0 <= found.noise_share < 0.1


def test_intervals_hold_the_median(clock):
    for verdict in decided(clock, {"a": -50_000, "b": 20_000}).verdicts.values():
        low, high = verdict.interval_ns
        assert low <= verdict.delta_ns <= high
        assert verdict.reason.startswith(units.delta(verdict.delta_ns))


def test_noise_share_grows_with_the_noise(clock):
    assert decided(clock, {"a": 0}, noise=0.05).noise_share > decided(clock, {"a": 0}, noise=0.0005).noise_share


def test_small_gains_stay_together_or_go_together(clock):
    """Each is faster for certain and below the threshold; their sum is past it, or is not and then is not timed again."""
    for effect, status in ((-7_000, Status.KEPT), (-2_000, Status.TOO_LITTLE)):
        effects = {"fast": -60_000, "small": effect, "none": 0, "small2": effect, "slow": 40_000}
        found = decided(clock, effects, noise=0.0001, min_gain=0.01).verdicts
        assert (found["small"].status, found["small2"].status) == (status, status)
        assert found["fast"].status is Status.KEPT
        assert (found["none"].status, found["slow"].status) == (Status.WITHIN_NOISE, Status.SLOWER)
        assert ("together with small2" in found["small"].reason) == (status is Status.KEPT)
        assert found["small"].delta_ns == pytest.approx(effect, rel=0.3)  # its own
        assert units.delta(2 * effect)[:2] in found["small"].reason or status is not Status.KEPT


def test_small_gains_that_are_a_loss_together_are_not_called_slower_each(clock):
    """They gain on top of a rewrite that does not stay, and lose without it."""

    def gain(variant):
        return -7_000 if "slow" in variant else 30_000

    found = decided(clock, {"slow": 40_000, "small": gain, "small2": gain}, noise=0.0001, min_gain=0.01).verdicts
    assert [found[name].status for name in found] == [Status.SLOWER, Status.WITHIN_NOISE, Status.WITHIN_NOISE]
    assert all("the step became slower" in found[name].reason for name in ("small", "small2"))


def test_one_small_gain_is_timed_once_more_by_itself(clock):
    """It is faster for certain and lies within the noise of the first run; the second decides."""
    found = [decided(clock, {"small": -9_000}, noise=0.012, seed=seed).verdicts["small"] for seed in range(40)]
    again = [verdict for verdict in found if "too little to tell; once more: " in verdict.reason]
    assert {Status.KEPT} < {verdict.status for verdict in found}
    assert sum(verdict.status is Status.KEPT for verdict in again) >= 3
    for verdict in again:
        assert ("the whole interval is past" in verdict.reason) == (verdict.status is Status.KEPT)
        decided_by = verdict.reason.partition("once more: ")[2]
        assert decided_by.startswith(f"{units.delta(verdict.delta_ns)} {units.delta_interval(*verdict.interval_ns)}")


def test_what_is_kept_together_is_in_the_confirmed_step(clock):
    found = decided(clock, {"small": -7_000, "small2": -7_000}, noise=0.0001, min_gain=0.01)
    assert found.before.median_ns - found.after.median_ns == pytest.approx(14_000, rel=0.3)


def test_what_was_timed_without_others_needs_no_confirmation_and_the_rest_is_timed_once_at_the_end(clock):
    behind_a_loss = decided(clock, {"slow": 60_000, "fast": -60_000}, noise=0.0001)
    in_front = decided(clock, {"fast": -60_000, "slow": 60_000}, noise=0.0001)
    assert [found.verdicts["fast"].status for found in (behind_a_loss, in_front)] == [Status.KEPT, Status.KEPT]
    assert (behind_a_loss.is_as_kept, in_front.is_as_kept) == (False, True)
    assert in_front.before.median_ns - in_front.after.median_ns == pytest.approx(60_000, rel=0.1)
    assert behind_a_loss.after.median_ns <= 1.001 * behind_a_loss.before.median_ns


def test_nothing_that_may_do_nothing_rides_along(clock):
    for seed in range(20):
        found = decided(clock, {"fast": -60_000, "a": 0, "b": 0, "c": 0}, seed=seed).verdicts
        assert all(found[name].status is not Status.KEPT for name in "abc")


@pytest.mark.parametrize(("noise", "is_longer"), [(0.002, False), (0.3, True)])
def test_a_step_that_differs_from_itself_is_timed_for_longer_on_a_cpu_too(clock, noise, is_longer):
    budget_s, seen = 0.05, []  # ten to twenty rounds of three runs
    decided(clock, {"none": 0}, noise=noise, budget_s=budget_s, step=lambda *_: seen.append(clock.seconds()))
    assert (seen[-1] - seen[0] > 1.5 * budget_s) is is_longer
    assert seen[-1] - seen[0] < 2.5 * budget_s
