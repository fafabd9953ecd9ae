"""What a step's noise hides is judged by the chain's own times, and only that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_advisor.fuse.decide.alone import (
    each_of,
    far_too_little,
    is_longer_in_vain,
    judged_alone,
    not_worth_the_step,
    pooled,
    savings_alone,
    total_of,
)
from fusion_advisor.fuse.decide.step_runner import Candidate
from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.records import Status
from fusion_advisor.timing.interleaving import Difference
from fusion_advisor.timing.wall_timer import as_timing
from tests.fuse.decide.test_keep_rule import decided
from tests.report.fixtures import applied
from tests.timing.planted import PlantedTimer

GAIN = Difference(median_ns=-20_000, low_ns=-22_000, high_ns=-18_000)


def verdict(status, low_ns=-90_000, high_ns=80_000):
    return Verdict(id="F1", status=status, reason="±", delta_ns=-5_000, interval_ns=(low_ns, high_ns))


def judged(found, alone=GAIN):
    return judged_alone(found, alone, step_ns=1_000_000, min_gain=0.005)


def test_a_gain_that_the_chain_shows_is_kept():
    found = judged(verdict(Status.WITHIN_NOISE))
    assert (found.status, found.delta_ns, found.interval_ns) == (Status.KEPT, -20_000, (-22_000, -18_000))
    assert "chain's own times" in found.reason and found.is_timed_alone


@pytest.mark.parametrize(
    ("found", "alone"),
    [
        (verdict(Status.SLOWER), GAIN),
        (verdict(Status.WITHIN_NOISE, low_ns=1_000), GAIN),  # the step did not become faster in any case
        (verdict(Status.WITHIN_NOISE), None),
        (verdict(Status.WITHIN_NOISE), Difference(median_ns=-9_000, low_ns=-20_000, high_ns=-4_000)),  # below the least gain
        (verdict(Status.KEPT), GAIN),
    ],
)
def test_any_other_verdict_stays(found, alone):
    assert judged(found, alone) is found


def test_a_chain_counts_once_for_each_of_its_runs():
    fusion = replace(
        applied().fusions[0], chain_before=as_timing([100] * 9, "cpu_time"), chain_after=as_timing([40] * 9, "cpu_time")
    )
    (saving,) = savings_alone([fusion, replace(fusion, chain_after=None)], {fusion.chain_id: 12}, 0.95).values()
    assert saving == Difference(median_ns=-720, low_ns=-720, high_ns=-720)


@pytest.mark.slow
def test_a_loud_step_keeps_what_its_chain_shows_and_nothing_else(clock):
    effects = {"gelu": -20_000, "idle": 0}
    for seed in range(10):
        found = decided(clock, effects, noise=0.2, seed=seed, alone={"gelu": GAIN}).verdicts
        assert (found["gelu"].status, found["idle"].status is Status.KEPT) == (Status.KEPT, False)
        without = decided(clock, effects, noise=0.2, seed=seed).verdicts
        assert without["gelu"].status is not Status.KEPT


def span(low_ns, high_ns):
    return Difference(median_ns=(low_ns + high_ns) // 2, low_ns=low_ns, high_ns=high_ns)


def test_what_saves_next_to_nothing_by_itself_is_left_out():
    alone = {"none": span(-10, 10), "loss": span(5_000, 9_000), "some": span(-900, -700), "gain": span(-22_000, -18_000)}
    found = not_worth_the_step(alone, step_ns=1_000_000, min_gain=0.005, rounds=200)
    assert set(found) == {"none", "loss", "some"}
    assert {verdict.status for verdict in found.values()} == {Status.TOO_LITTLE}
    assert found["some"].interval_ns == (-900, -700) and found["some"].is_timed_alone
    assert "by itself" in found["some"].reason and "the step was not timed with it" in found["some"].reason


def test_what_might_pass_together_is_timed_in_the_step():
    """Each may save 0.1 % of the step; five times 0.1 % are the least gain, and a step may double it."""
    alone = {str(number): span(-1_000, 0) for number in range(5)}
    assert len(not_worth_the_step(alone, step_ns=1_000_000, min_gain=0.005, rounds=10**6)) == 1
    assert not_worth_the_step({"wide": span(-2_000, 5_000)}, step_ns=1_000_000, min_gain=0.005, rounds=10**6) == {}
    assert not_worth_the_step({"any": span(-1, 1)}, step_ns=1_000_000, min_gain=0.0, rounds=10**6) == {}


@pytest.mark.parametrize(("own", "rounds", "is_timed"), [
    (span(-4_000, -3_000), 6, False),  # twice 4 µs are less than a twentieth of the step over the root of 6
    (span(-4_000, -3_000), 200, True),  # more than that over the root of 200
    (span(-14_000, -3_000), 6, True),
    (span(-8_000, -6_000), 6, True),  # past the least gain by itself: the step may still refuse it
])  # fmt: skip
def test_what_the_noise_of_the_step_would_hide_is_left_out_where_its_own_times_do_not_keep_it(own, rounds, is_timed):
    found = not_worth_the_step({"F2": own}, step_ns=1_000_000, min_gain=0.005, rounds=rounds)
    assert ("F2" not in found) is is_timed
    if not is_timed:
        assert "hidden by a step's noise of 20.4 µs at best" in found["F2"].reason


def test_the_step_is_not_timed_with_what_is_left_out(clock):
    alone = {"gelu": GAIN, "idle": span(-100, 100)}
    turns = []

    def run(**options):
        turns.clear()
        effects = {"gelu": -20_000, "idle": 0}
        return decided(clock, effects, noise=0.001, step=lambda *told: turns.append(told[2]), alone=alone, **options).verdicts

    found = run()
    assert all(told.startswith("gelu:") for told in turns)
    assert list(found) == ["gelu", "idle"]
    assert (found["gelu"].status, found["idle"].status) == (Status.KEPT, Status.TOO_LITTLE)
    assert run(min_gain=0.0)["idle"].status is not Status.TOO_LITTLE
    assert turns[0].startswith("gelu, idle:")


def test_passes_are_timed_by_themselves_once(clock):
    asked = []

    def passes_alone():
        asked.append(1)
        return {"idle": span(0, 0)}

    found = decided(clock, {"idle": 0, "gelu": -20_000}, noise=0.001, estimates=passes_alone).verdicts
    assert asked == [1]
    assert found["idle"].status is Status.TOO_LITTLE
    assert found["gelu"].status is Status.KEPT


def test_longer_timing_is_in_vain_where_the_noise_left_hides_every_open_rewrite():
    kept, open_one = verdict(Status.KEPT), replace(verdict(Status.WITHIN_NOISE), id="F2")
    small, unknown = {"F2": span(-1_000, -900)}, {"F1": GAIN}

    def in_vain(alone, noise_ns):
        return is_longer_in_vain([kept, open_one], alone, noise_ns=noise_ns, times_longer=4.0)

    assert in_vain(small, 4_100) and not in_vain(small, 3_900)
    assert not in_vain(unknown, 1e9)
    assert is_longer_in_vain([kept], {}, noise_ns=0.0, times_longer=4.0)


def test_a_loud_step_is_timed_for_longer_only_where_that_may_tell_something():
    def turns(idle_alone):
        shown = []
        decided(
            PlantedTimer(), {"gelu": -20_000, "idle": 0}, noise=0.2, min_gain=0.0015, budget_s=0.1,
            alone={"gelu": GAIN, "idle": idle_alone}, step=lambda *row: shown.append(row),
        )  # fmt: skip
        return len(shown)

    assert turns(span(-900_000, 900)) > 1.5 * turns(span(-900, 900))


def rewrites(*names):
    return [Candidate(id=name) for name in names]


def test_what_is_too_little_by_its_own_times_is_put_on_the_step_together_and_last():
    alone = {"F1": span(-90_000, -90_000), "F2": span(-3_000, -2_500), "F3": span(-2_000, -1_500), "F4": span(-4_600, -4_600)}
    found = pooled(rewrites("unknown", "F2", "F1", "F3", "F4"), alone, step_ns=1_000_000, min_gain=0.005)
    assert [one.id for one in found] == ["unknown", "F1", "F4", "F2, F3"]  # 0.5 % of the 900 µs that are left is 4.5 µs
    assert [one.id for one in found[-1].rewrites] == ["F2", "F3"]
    assert total_of(alone, found[-1]) == span(-5_000, -4_000)
    assert found[0].rewrites == (found[0],)


def test_one_that_is_too_little_is_timed_by_itself():
    candidates = rewrites("F1", "F2")
    assert pooled(candidates, {"F2": span(-10, -9)}, step_ns=1_000_000, min_gain=0.005) == candidates
    assert pooled(candidates, {}, step_ns=1_000_000, min_gain=0.005) == candidates


@pytest.mark.parametrize(
    ("status", "of_each"),
    [(Status.KEPT, Status.KEPT), (Status.TOO_LITTLE, Status.TOO_LITTLE), (Status.SLOWER, Status.WITHIN_NOISE)],
)
def test_each_of_several_has_their_verdict_and_its_share_of_what_they_save(status, of_each):
    alone = {"F2": span(-3_000, -3_000), "F3": span(-1_000, -1_000)}
    together = Candidate(id="F2, F3", parts=tuple(rewrites("F2", "F3")))
    joint = replace(verdict(status), id=together.id, delta_ns=-8_000, interval_ns=(-9_000, -7_000))
    found = each_of(joint, together, alone)
    assert {name: one.status for name, one in found.items()} == {"F2": of_each, "F3": of_each}
    assert (found["F2"].delta_ns, found["F2"].interval_ns) == (-6_000, (-6_750, -5_250))
    assert found["F3"].delta_ns == -2_000
    assert {name: one.timed_with for name, one in found.items()} == {"F2": ("F3",), "F3": ("F2",)}
    assert found["F2"].reason.startswith("by its own times −3.00 µs per step, too little by itself; together with F3: ")
    assert each_of(joint, Candidate(id="F9"), {}) == {"F9": joint}


@pytest.mark.parametrize(("low_ns", "is_left_out"), [(-20, True), (-30, False), (5, True)])
def test_a_step_is_not_timed_with_what_saves_less_than_asked_even_twice_over(low_ns, is_left_out):
    change = Difference(median_ns=low_ns + 5, low_ns=low_ns, high_ns=low_ns + 10)
    verdict = far_too_little("G1", change, step_ns=10_000, min_gain=0.005)
    assert (verdict is not None) == is_left_out
    if verdict is not None:
        status = Status.SLOWER if low_ns > 0 else Status.TOO_LITTLE
        assert (verdict.status, verdict.is_timed_alone, verdict.delta_ns) == (status, True, change.median_ns)
        assert "the step was not timed with it" in verdict.reason
    assert far_too_little("G1", None, step_ns=10_000, min_gain=0.005) is None


def test_on_a_gpu_only_what_saves_next_to_nothing_is_left_out():
    own = {"F1": span(-900, -900), "F2": span(-2_000, -2_000)}
    found = not_worth_the_step(own, step_ns=1_000_000, min_gain=0.005, rounds=6, round_noise=0.0)
    assert list(found) == ["F1"]  # twice 900 ns are within half of 5 µs, twice 2 µs are not
