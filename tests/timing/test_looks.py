"""Looks at a comparison that goes on: a gain ends it early, and chance does not, however often it is looked at."""

from __future__ import annotations

import random

import pytest

from fusion_advisor.fuse.decide.step_runner import changes, is_clear, open_steps, settles
from fusion_advisor.records import Status
from fusion_advisor.timing import looks
from tests.fuse.decide.test_keep_rule import STEP_NS, decided


def rounds(count, ratio, spread, seed):
    """Times of a step twice and of the step with a rewrite; each round has a level of its own, and one in ten is disturbed."""
    draw = random.Random(seed)
    levels = [draw.gauss(100_000_000, 5_000_000) * (1.5 if draw.random() < 0.1 else 1.0) for _ in range(count)]
    return [[round(level * gain * draw.gauss(1, spread)) for level in levels] for gain in (1, 1, ratio)]


def plainly(times, confidence):
    """The difference and the noise as one look would tell them that spends the whole error at once."""
    control, before, after = times
    noise = looks.difference(control, before, confidence)
    return looks.difference(before, after, confidence), max(abs(noise.low_ns), abs(noise.high_ns))


def no(_):
    return False


DUE = [count for count in looks.ROUNDS if count < 100]


def test_a_look_is_due_after_few_numbers_of_rounds_alone():
    assert [count for count in range(2, 201) if looks.at_look(rounds(count, 1, 0.01, 0), 0.95, no)] == list(looks.ROUNDS)


@pytest.mark.slow
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_all_looks_together_raise_no_more_than_the_error_allowed(confidence):
    """The true difference is outside of one of the intervals that could end the comparison."""
    truth, wrong, draws = 1.0, 0, 500
    for seed in range(draws):
        times = rounds(100, truth, 0.02, seed)
        some = [looks.at_look([series[:count] for series in times], confidence, no) for count in DUE]
        end = looks.changes(times, confidence, no, no)
        wrong += any(not one.change.low_ns <= 0 <= one.change.high_ns for (one,) in (*some, end))
    assert wrong <= (1 - confidence) * draws


@pytest.mark.slow
def test_unguarded_looks_would_raise_more():
    """The test above can fail: the same number of looks at plain intervals is wrong far more often."""
    wrong = 0
    for seed in range(300):
        times = rounds(100, 1.0, 0.02, seed)
        some = [plainly([series[:count] for series in times], 0.8) for count in (*DUE, 100)]
        wrong += any(not one.low_ns <= 0 <= one.high_ns for one, _ in some)
    assert wrong > 0.3 * 300


def test_what_a_look_decided_is_what_it_saw_and_the_end_is_stricter_than_one_look():
    times = rounds(20, 0.9, 0.001, 1)
    (seen,) = looks.at_look(times, 0.95, no)
    assert looks.changes(times, 0.95, no, lambda _: True) == (seen,)
    (end,), (plain, noise_ns) = looks.changes(times, 0.95, no, no), plainly(times, 0.95)
    assert end != seen
    assert end.change.low_ns <= plain.low_ns < plain.high_ns <= end.change.high_ns
    assert end.noise_ns >= 0.99 * noise_ns


def change(low_ns, high_ns, noise_ns=1_000):
    found = looks.Difference(median_ns=(low_ns + high_ns) // 2, low_ns=low_ns, high_ns=high_ns)
    return looks.Change(step_ns=STEP_NS, noise_ns=noise_ns, change=found)


@pytest.mark.parametrize(
    ("spans", "wanted"),
    [
        ([(-60_000, -50_000)], True),  # kept
        ([(-60_000, -50_000), (-9_000, -1_000)], False),  # the second may be a gain of 0.5 %
        ([(-60_000, -50_000), (-2_000, 2_000)], True),
        ([(50_000, 60_000)], True),  # slower
        ([(-4_000, 1_000), (-4_000, 1_000)], False),  # together they may be
        ([(-4_000, -1_000), (-4_000, -1_000)], True),  # they are timed together next
        ([(-2_000, 1_000), (-2_000, 1_000)], True),
        ([], False),
    ],
)
def test_what_ends_a_comparison(spans, wanted):
    assert is_clear([change(*span) for span in spans], 0.005) is wanted


def test_a_loud_step_is_not_decided_by_a_gain_within_its_noise():
    assert not is_clear([change(-60_000, -50_000, noise_ns=55_000)], 0.005)


def test_a_clear_gain_takes_a_few_rounds(clock):
    seen = []
    gains = {f"fast {number}": -60_000 for number in range(8)}
    found = decided(clock, gains, noise=0.001, budget_s=10.0, step=lambda turns, *_: seen.append(turns))
    assert {verdict.status for verdict in found.verdicts.values()} == {Status.KEPT}
    assert max(seen) // (len(gains) + 2) < 200
    took_s = clock.seconds()
    unclear = []
    assert decided(clock, {"open": -6_000}, noise=0.02, budget_s=10.0, step=lambda turns, *_: unclear.append(turns)).verdicts
    assert max(unclear) // 3 == 200
    assert clock.seconds() - took_s > took_s


# ------------------------------------------------------------- several rewrites in the same rounds


def stacked(count, gains, spread, seed):
    """Times of a step twice, and with one rewrite more each; each saves a share of the step."""
    draw = random.Random(seed)
    levels = [draw.gauss(100_000_000, 5_000_000) for _ in range(count)]
    shares = [1.0, *(1 - sum(gains[:number]) for number in range(len(gains) + 1))]
    return [[round(level * share * draw.gauss(1, spread)) for level in levels] for share in shares]


def as_timed(times):
    """What the rounds leave of the times of all: a step is left out from the look on that leaves it out."""
    left, made = set(range(len(times))), [[] for _ in times]
    for number in range(len(times[0])):
        for position in left:
            made[position].append(times[position][number])
        found = open_steps(0.005, 0.95)(made)
        left = left if found is None else left & set(found)
    return made


def test_a_settled_rewrite_costs_no_further_rounds():
    times = as_timed(stacked(100, [0.05, 0.0049, 0.03, 0.04], 0.002, 3))
    assert [len(series) for series in times] == [15, 15, 100, 100, 10, 10], (
        "the second rewrite is open, so the steps without it and with it go on"
    )
    assert [len(series) for series in as_timed(stacked(100, [0.05, 0.04], 0.001, 3))] == [10, 10, 10, 10]


def test_a_settled_rewrite_is_what_its_look_saw_and_stays_so():
    whole = stacked(100, [0.05, 0.0049, 0.03, 0.04], 0.002, 3)
    times = as_timed(whole)
    first = looks.at_look([series[:10] for series in whole], 0.95, no)
    found = changes(times, 0.005, 0.95)
    assert (found[0], found[3]) == (first[0], first[3]) and settles(first[0], 0.005) and settles(first[3], 0.005)
    end = looks.changes(whole, 0.95, no, no)[1]
    assert found[1].change == end.change, "what no look settles is read at the end, off all rounds"
    assert found[1].noise_ns < 0.005 * end.step_ns, "of the rounds that the step itself has"


def test_the_step_itself_is_timed_for_as_long_as_its_noise_may_decide():
    loud = as_timed(stacked(100, [0.05, 0.006], 0.01, 3))
    assert [len(series) for series in loud] == [100, 100, 100, 100], "the noise alone may hide 0.6 %"
    lengths = [len(series) for series in as_timed(stacked(160, [0.05, 0.0049], 0.005, 1))]
    assert lengths[0] == lengths[1] in looks.ROUNDS[1:-2] and lengths[2:] == [160, 160], "later rounds showed enough of it"


def test_what_is_kept_without_further_rounds_of_the_step_itself_is_kept_with_them():
    """Gains about the least one, where a threshold that moved would show."""
    kept = []
    for seed in range(60):
        gain = random.Random(seed).choice([0.004, 0.005, 0.006, 0.007])
        whole = stacked(90, [gain], 0.002, seed)
        timed = as_timed(whole)
        pair = [changes(times, 0.005, 0.95)[0] for times in (timed, [series[: len(timed[-1])] for series in whole])]
        kept.append([one.change.high_ns < -max(0.005 * one.step_ns, one.noise_ns) for one in pair])
    assert all(one == other for one, other in kept) and 0 < sum(one for one, _ in kept) < 60


@pytest.mark.parametrize("gain", [0.0, 0.005])
def test_rewrites_that_are_settled_one_by_one_are_kept_no_oftener_than_the_error_allows(gain):
    """Six rewrites that save nothing, or just the least gain: a kept one would be wrong."""
    draws, kept = 60, 0
    for seed in range(draws):
        for one in changes(as_timed(stacked(100, [gain] * 6, 0.01, seed)), 0.005, 0.95):
            kept += one.change.high_ns < -max(0.005 * one.step_ns, one.noise_ns)
    assert kept <= 0.05 * draws * 6


def test_short_rounds_are_not_looked_at():
    """Ten rounds of half a millisecond may all be disturbed by one thing."""
    times = [[value // 200 for value in series] for series in rounds(10, 0.5, 0.001, 1)]
    assert looks.at_look(times, 0.95, no) == () and open_steps(0.005, 0.95)(times) is None


def test_rests_are_time_in_which_a_disturbance_would_show():
    """Ten rounds of three steps of 11 ms last a third of a second, with rests twice as long a whole one."""
    times = [[value // 9 for value in series] for series in rounds(10, 0.5, 0.001, 1)]
    assert looks.at_look(times, 0.95, no) == () and looks.at_look(times, 0.95, no, rest=2.0) != ()
    assert open_steps(0.005, 0.95)(times) is None and open_steps(0.005, 0.95, 2.0)(times) == ()
    assert changes(times, 0.005, 0.95, 2.0) == looks.at_look(times, 0.95, no, rest=2.0)
