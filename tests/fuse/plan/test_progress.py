"""Phases are announced in order, and those of a whole run sum to it."""

from __future__ import annotations

from fusion_advisor.fuse.plan.progress import PhaseClock, Progress


class Seconds:
    """A clock that stands still until it is moved."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Names(Progress):
    def __init__(self):
        self.names = []

    def phase(self, name):
        self.names.append(name)


def run(*, is_whole):
    seconds, names = Seconds(), Names()
    clock = PhaseClock(names, is_whole=is_whole, now=seconds)
    seconds.now += 1
    with clock.phase("first"):
        seconds.now += 2
    seconds.now += 4
    with clock.phase("second"):
        seconds.now += 8
    return clock, seconds, names


def test_a_phase_is_timed_by_itself():
    clock, _, names = run(is_whole=False)
    assert names.names == ["first", "second"]
    assert clock.durations_s == [("first", 2.0), ("second", 8.0)]
    assert clock.elapsed_s() == 15.0


def test_phases_of_a_whole_run_sum_to_it():
    clock, _, _ = run(is_whole=True)
    assert clock.durations_s == [("first", 3.0), ("second", 12.0)]
    assert sum(taken for _, taken in clock.durations_s) == clock.elapsed_s()


def test_a_phase_in_two_parts():
    clock, seconds, names = run(is_whole=True)
    with clock.phase("third"):
        seconds.now += 16
        clock.split("its first part")
        answered = clock.elapsed_s()
        seconds.now += 32
    assert names.names[-1] == "third"
    assert clock.durations_s[2:] == [("its first part", 16.0), ("third", 32.0)]
    assert sum(taken for _, taken in clock.durations_s[:3]) == answered
