"""Looks at a comparison that goes on: a gain ends it early, and chance does not, however often it is looked at."""

from __future__ import annotations

import random

import pytest

from fusion_advisor.fuse.decide.step_runner import is_clear
from fusion_advisor.records import Status
from fusion_advisor.timing import looks
from tests.fuse.decide.test_keep_rule import STEP_NS, clock, decided  # noqa: F401


def rounds(count, ratio, spread, seed):
    """Times of a step twice and of the step with a rewrite; each round has a level of its own, and one in ten is disturbed."""
    draw = random.Random(seed)
    levels = [draw.gauss(1_000_000, 50_000) * (1.5 if draw.random() < 0.1 else 1.0) for _ in range(count)]
    return [[round(level * gain * draw.gauss(1, spread)) for level in levels] for gain in (1, 1, ratio)]


def plainly(times, confidence):
    """The difference and the noise as one look would tell them that spends the whole error at once."""
    control, before, after = times
    noise = looks.difference(control, before, confidence)
    return looks.difference(before, after, confidence), max(abs(noise.low_ns), abs(noise.high_ns))


def test_a_look_is_due_after_few_numbers_of_rounds_alone():
    assert [count for count in range(2, 201) if looks.at_look(rounds(count, 1, 0.01, 0), 0.95)] == list(looks.ROUNDS)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_all_looks_together_raise_no_more_than_the_error_allowed(confidence):
    """The true difference is outside of one of the intervals that could end the comparison."""
    truth, wrong, draws = 1.0, 0, 500
    for seed in range(draws):
        times = rounds(100, truth, 0.02, seed)
        some = [looks.at_look([series[:count] for series in times], confidence) for count in looks.ROUNDS[:4]]
        end = looks.changes(times, confidence, lambda _: False)
        wrong += any(not one.change.low_ns <= 0 <= one.change.high_ns for (one,) in (*some, end))
    assert wrong <= (1 - confidence) * draws


def test_unguarded_looks_would_raise_more():
    """The test above can fail: the same number of looks at plain intervals is wrong far more often."""
    wrong = 0
    for seed in range(300):
        times = rounds(100, 1.0, 0.02, seed)
        some = [plainly([series[:count] for series in times], 0.8) for count in (*looks.ROUNDS[:4], 100)]
        wrong += any(not one.low_ns <= 0 <= one.high_ns for one, _ in some)
    assert wrong > 0.3 * 300


def test_what_a_look_decided_is_what_it_saw_and_the_end_is_stricter_than_one_look():
    times = rounds(20, 0.9, 0.001, 1)
    (seen,) = looks.at_look(times, 0.95)
    assert looks.changes(times, 0.95, lambda _: True) == (seen,)
    (end,), (plain, noise_ns) = looks.changes(times, 0.95, lambda _: False), plainly(times, 0.95)
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


def test_a_clear_gain_takes_a_few_rounds(clock):  # noqa: F811
    seen = []
    found = decided(clock, {"fast": -60_000}, noise=0.001, budget_s=10.0, step=lambda turns, *_: seen.append(turns))
    assert found.verdicts["fast"].status is Status.KEPT
    assert max(seen) // 3 < 200
    took_s = clock.seconds()
    unclear = []
    assert decided(clock, {"open": -6_000}, noise=0.02, budget_s=10.0, step=lambda turns, *_: unclear.append(turns)).verdicts
    assert max(unclear) // 3 == 200
    assert clock.seconds() - took_s > took_s
