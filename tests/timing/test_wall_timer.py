"""The interval of a median from order statistics, and timing on a fake clock."""

from __future__ import annotations

import random

import pytest

from fusion_advisor.timing.wall_timer import as_timing, median_interval, wall_times


def test_few_values_give_the_whole_range():
    assert median_interval([3, 1, 2]) == (2, 1, 3)
    assert median_interval([7]) == (7, 7, 7)
    assert median_interval([4, 1, 3, 2]) == (2.5, 1, 4)


@pytest.mark.parametrize("count", [6, 15, 40, 101])
@pytest.mark.parametrize(
    "draw", [lambda r: r.gauss(0, 1), lambda r: r.expovariate(1) - 0.6931471805599453], ids=["normal", "skewed"]
)
def test_the_interval_covers_the_true_median_as_often_as_it_says(count, draw):
    rng = random.Random(count)
    hits = 0
    for _ in range(800):
        middle, low, high = median_interval([draw(rng) for _ in range(count)])
        assert low <= middle <= high
        hits += low <= 0 <= high
    assert hits / 800 >= 0.93


def test_more_confidence_is_wider_and_more_values_narrower():
    rng = random.Random(0)
    values = [rng.gauss(0, 1) for _ in range(200)]

    def width(values, confidence):
        _, low, high = median_interval(values, confidence)
        return high - low

    assert width(values, 0.9) <= width(values, 0.95) <= width(values, 0.99)
    assert width(values, 0.95) < width(values[:20], 0.95)


@pytest.mark.parametrize(
    ("count", "confidence", "outside"),
    [
        (6, 0.95, 0),
        (10, 0.95, 1),
        (20, 0.95, 5),
        (50, 0.95, 17),
        (51, 0.95, 18),
        (50, 0.999, 13),
        (50, 0.8, 19),
        (5, 0.5, 1),
        (3000, 0.95, 1445),
    ],
)
def test_ranks_are_those_of_the_binomial_distribution(count, confidence, outside):
    """As tables of the sign test have them; the same number of values lies outside at both ends."""
    assert median_interval(range(count), confidence)[1:] == (outside, count - 1 - outside)


def test_a_timing_keeps_every_value():
    timing = as_timing([5, 1, 3], "wall")
    assert (timing.times_ns, timing.median_ns, timing.ci_low_ns, timing.ci_high_ns) == ((5, 1, 3), 3, 1, 5)


def test_warmups_are_not_counted(clock):
    costs = iter([1000, 500, 10, 20, 30, 40, 50, 60])

    def call():
        clock.now_ns += next(costs)

    assert wall_times(call, runs=6, budget_s=10.0, on_cuda=False, timer=clock, warmup=2) == [10, 20, 30, 40, 50, 60]


def test_the_budget_ends_the_runs_but_five_are_made(clock):
    def call():
        clock.now_ns += 10**9

    assert len(wall_times(call, runs=50, budget_s=1.0, on_cuda=False, timer=clock)) == 5
    assert len(wall_times(call, runs=50, budget_s=8.0, on_cuda=False, timer=clock)) == 8
    assert len(wall_times(call, runs=7, budget_s=1e9, on_cuda=False, timer=clock)) == 7


def test_a_least_time_goes_beyond_runs_and_budget(clock):
    def call():
        clock.now_ns += 10**9

    assert len(wall_times(call, runs=6, budget_s=1.0, least_s=9.0, on_cuda=False, timer=clock)) == 9
    assert len(wall_times(call, runs=6, budget_s=1e9, least_s=2.0, on_cuda=False, timer=clock)) == 6


@pytest.mark.parametrize(("spread", "runs"), [(0.0001, 10), (0.1, 50)])
def test_a_step_is_timed_no_longer_than_its_median_takes_to_be_known(clock, spread, runs):
    rng = random.Random(1)

    def call():
        clock.now_ns += round(10_000_000 * rng.gauss(1, spread))

    def timed(**how):
        return len(wall_times(call, runs=50, budget_s=60.0, on_cuda=False, timer=clock, **how))

    assert timed(known_to=0.01) == runs
    assert timed() == 50 and timed(known_to=0.01, least_s=0.3) >= 30
