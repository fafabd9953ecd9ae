"""Times are enough once they are known, and not before."""

from __future__ import annotations

import random

import pytest

from fusion_advisor.timing.interleaving import interleave
from fusion_advisor.timing.known import is_known, until_known_alone, until_precise


def test_ways_are_known_when_the_intervals_of_the_quicker_ones_are_narrow():
    known = is_known(0.01)
    narrow, wide = [1000 + number % 20 for number in range(30)], [1000 + 5 * (number % 20) for number in range(30)]
    slow = [2 * value for value in wide]
    assert known([narrow]) and not known([wide])
    assert known([slow, narrow]) and known([slow, narrow, narrow, slow])
    assert not known([slow, narrow, wide]) and not known([wide, narrow, slow])
    assert not known([narrow, slow, slow])  # two are the quicker half of three


def test_steps_are_precise_where_each_is_known_by_enough_rounds():
    precise = until_precise(0.001, 20)
    narrow, wide = [100_000 + number % 20 for number in range(30)], [100_000 + 50 * (number % 20) for number in range(30)]
    assert precise([narrow, narrow]) == ()
    assert precise([narrow, wide]) is precise([wide, narrow]) is None
    assert precise([narrow[:19], narrow[:19]]) is None


def test_steps_that_differ_by_much_are_precise_where_the_difference_is_known():
    """15.5 and 10.3 ms: a hundredth of what they differ by is more than a thousandth of each."""
    precise = until_precise(0.001, 20, 0.01)
    before, after = ([base + 110 * (number % 10) for number in range(30)] for base in (155_000, 103_000))
    assert precise([before, after]) == () and precise([before[:19], after[:19]]) is None
    assert until_precise(0.001, 20)([before, after]) is None
    late = [base + 9_000 * (number % 3) for number, base in enumerate(after)]
    assert precise([before, late]) is None, "the difference itself is not known"
    assert precise([before, [value - 100 * (number % 5) for number, value in enumerate(before)]]) is None, "they hardly differ"
    assert precise([before, before]) == (), "no difference at all is known"


@pytest.mark.parametrize(("on_cuda", "spread", "rounds"), [(True, 0.001, 12), (True, 0.1, 40), (False, 0.001, 40)])
def test_alone_a_gpu_is_timed_no_longer_than_it_takes_to_know(clock, on_cuda, spread, rounds):
    draw = random.Random(1)

    def call():
        clock.now_ns += round(2_000_000 * draw.gauss(1, spread))

    still_open = until_known_alone(on_cuda=on_cuda)
    times = interleave([call, call], rounds=40, budget_s=1e9, on_cuda=False, still_open=still_open, timer=clock)
    assert [len(series) for series in times] == [rounds, rounds]
