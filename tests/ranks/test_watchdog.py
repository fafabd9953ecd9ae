"""A rank that fails, hangs or dies is named on all ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from fusion_advisor.ranks import watchdog
from fusion_advisor.ranks.watchdog import Watchdog


class Clock:
    """Seconds that go on when a test says so."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Pair:
    """The watchdogs of two ranks over one store; nothing runs by itself."""

    def __init__(self):
        self.clock, self.ended = Clock(), []
        store = dist.HashStore()
        self.dogs = [Watchdog(store, rank, 2, end=self.ended.append, seconds=self.clock) for rank in range(2)]
        self.look()

    def look(self, *ranks):
        for rank in ranks or (0, 1):
            self.dogs[rank].look()

    def passes(self, seconds, *ranks):
        """Let time go by in steps of the thread's period; only the ranks named give a sign of life."""
        for _ in range(round(seconds / 0.5)):
            self.clock.now_s += 0.5
            self.look(*ranks)


def test_two_ranks_that_live_are_left_alone():
    pair = Pair()
    pair.dogs[0].reached("profile")
    pair.passes(120)
    assert [dog.failure for dog in pair.dogs] == [None, None] and pair.ended == []


def test_a_failure_reaches_the_other_rank_and_the_first_one_counts():
    pair = Pair()
    pair.dogs[1].fail("ValueError: no")
    pair.dogs[0].fail("its own")
    pair.look()
    assert {(dog.failure.rank, dog.failure.reason) for dog in pair.dogs} == {(1, "ValueError: no")}


def test_a_process_that_is_gone_is_noticed_within_seconds():
    pair = Pair()
    pair.dogs[1].reached("fusions")
    pair.look()
    pair.passes(watchdog.DEAD_S - 1, 0)
    assert pair.dogs[0].failure is None
    pair.passes(3, 0)
    assert pair.dogs[0].failure.rank == 1 and "gone" in pair.dogs[0].failure.reason and "fusions" in pair.dogs[0].failure.reason


def test_a_rank_that_others_wait_for_hangs_and_one_that_nobody_waits_for_works():
    pair = Pair()
    pair.dogs[1].reached("keep what pays")
    pair.passes(60)
    assert pair.dogs[0].failure is None
    pair.dogs[0].waits(is_waiting=True)
    pair.passes(watchdog.STUCK_S - 1)
    pair.dogs[1].reached("another kernel")
    pair.passes(watchdog.STUCK_S - 1)
    assert pair.dogs[0].failure is None
    pair.passes(3)
    assert [dog.failure.rank for dog in pair.dogs] == [1, 1] and "another kernel" in pair.dogs[0].failure.reason


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_main_thread_that_is_stuck_is_ended_with_its_process(capsys, has_ended):
    pair = Pair()
    pair.dogs[1].fail("ValueError: no")
    pair.look()
    if has_ended:
        pair.dogs[0].stop()
    pair.dogs[0].end_if_stuck()
    assert pair.ended == []
    pair.clock.now_s += watchdog.GRACE_S
    pair.dogs[0].end_if_stuck()
    assert pair.ended == ([] if has_ended else [3])
    assert ("rank 1 ended the run: ValueError: no" in capsys.readouterr().err) is not has_ended


def test_everything_is_over_within_thirty_seconds():
    assert watchdog.STUCK_S + watchdog.GRACE_S < 30 and watchdog.DEAD_S + watchdog.GRACE_S < 30


def test_a_rank_that_compiles_is_waited_for_longer():
    pair = Pair()
    pair.dogs[0].waits(is_waiting=True, patience_s=600)
    pair.passes(500)
    assert pair.dogs[0].failure is None
    pair.passes(110)
    assert pair.dogs[0].failure.rank == 1 and "did not go on for 600 s" in pair.dogs[0].failure.reason
