"""A limit says when work may begin and ends what goes on past it."""

from __future__ import annotations

import math

import pytest

from fusion_advisor.fuse.plan.options import ApplyOptions, Budgets
from fusion_advisor.fuse.points.time_limit import OutOfTime, TimeLimit, WatchedProgress


class Clock:
    def __init__(self):
        self.now_s = 5.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def test_work_begins_where_as_much_time_is_left_as_it_took_at_most(clock):
    limit = TimeLimit(10.0, clock)
    assert limit.has_room_for("a point")
    for seconds in (3.0, 2.0):
        with limit.spent_on("a point"):
            clock.now_s += seconds
    assert limit.left_s == 5.0 and limit.has_room_for("a point")
    clock.now_s += 2.0
    assert not limit.has_room_for("a point") and limit.has_room_for("a capture")
    clock.now_s += 3.0
    assert not limit.has_room_for("a capture")


def test_work_that_failed_says_nothing_of_its_length(clock):
    limit = TimeLimit(10.0, clock)
    with pytest.raises(OutOfTime), limit.spent_on("a point"):
        clock.now_s += 9.0
        raise OutOfTime
    assert limit.has_room_for("a point")


def test_trials_end_at_the_limit(clock):
    limit = TimeLimit(10.0, clock)
    progress = WatchedProgress(limit)
    progress.step(0, 9, "F1")
    clock.now_s += 10.0
    with pytest.raises(OutOfTime, match="the 10 s for all ranges were over"):
        progress.step(1, 9, "F2")


def test_what_gives_more_time_is_said(clock):
    assert TimeLimit(150.0, clock).sentence == "the 150 s for all ranges were over"
    limit = TimeLimit(150.0, clock, ", without --quick they have no limit")
    assert limit.sentence == "the 150 s for all ranges were over, without --quick they have no limit"


def test_only_a_quick_run_has_a_limit_unless_one_is_given():
    assert TimeLimit().left_s == math.inf
    assert ApplyOptions().ranges_limit_s("cuda") == ApplyOptions(effort="thorough").ranges_limit_s("cpu") == math.inf
    assert ApplyOptions(effort="quick").ranges_limit_s("cuda") == 240.0
    assert ApplyOptions(budgets=Budgets(ranges_s=3.0)).ranges_limit_s("cpu") == 3.0
