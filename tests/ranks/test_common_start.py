"""Ranks of one machine begin a timed run at one moment, however late one of them is told of the other."""

from __future__ import annotations

import time

from fusion_advisor.ranks.common_start import AHEAD_NS, CommonStart, this_machine
from fusion_advisor.ranks.instruments import AgreedTimer
from tests.ranks.two import both
from tests.timing.planted import PlantedTimer


class Ticking:
    """A clock that every reading moves on, and that starts late."""

    def __init__(self, start_ns: int) -> None:
        self.now_ns = start_ns

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns


def test_ranks_go_on_when_the_later_ones_clock_and_the_head_start_have_passed():
    def work(ranks):
        clock = Ticking(5_000_000 * ranks.rank)
        told = CommonStart(ranks, "here", clock).wait()
        return told, clock.now_ns

    begin = 5_000_000 + 1000 + AHEAD_NS
    assert both(work) == [(True, begin), (True, begin)]


def test_ranks_of_two_machines_do_not_wait_for_a_clock_that_is_not_theirs():
    def work(ranks):
        clock = Ticking(10**15 * ranks.rank)
        start = CommonStart(ranks, f"machine {ranks.rank}", clock)
        return start.wait(), start.wait(), clock.now_ns

    assert both(work) == [(False, False, 0), (False, False, 10**15)]


def test_machines_without_a_name_share_no_clock():
    assert both(lambda ranks: CommonStart(ranks, "").wait()) == [False, False]


def test_this_machine_has_one_name():
    assert this_machine() == this_machine()


def test_a_timed_run_starts_together_and_its_wait_is_not_timed():
    class Noting(PlantedTimer):
        def time_ns(self, call):
            self.began_ns = time.monotonic_ns()
            return super().time_ns(call)

    def work(ranks):
        own = Noting()
        if ranks.rank:
            time.sleep(0.02)  # it is told last, and would begin first
        taken = AgreedTimer(own, ranks).time_ns(lambda: setattr(own, "now_ns", own.now_ns + 7))
        return taken, own.began_ns

    (first, began), (second, other) = both(work)
    assert first == second == 7
    if this_machine():
        assert abs(began - other) < 15_000_000  # two threads of one interpreter take turns of 5 ms
