"""What a step's noise hides is judged by the chain's own times, and only that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_advisor.fuse.decide.alone import is_longer_in_vain, judged_alone, not_worth_the_step, savings_alone
from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.records import Status
from fusion_advisor.timing.interleaving import Difference
from fusion_advisor.timing.wall_timer import as_timing
from tests.fuse.decide.test_keep_rule import clock, decided  # noqa: F401
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
    assert "chain's own times" in found.reason


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
def test_a_loud_step_keeps_what_its_chain_shows_and_nothing_else(clock):  # noqa: F811
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
    assert found["some"].interval_ns == (-900, -700)
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


def test_the_step_is_not_timed_with_what_is_left_out(clock):  # noqa: F811
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


def test_passes_are_timed_by_themselves_once(clock):  # noqa: F811
    asked = []

    def passes_alone():
        asked.append(1)
        return {"idle": span(0, 0)}

    found = decided(clock, {"idle": 0, "gelu": -20_000}, noise=0.001, passes_alone=passes_alone).verdicts
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
