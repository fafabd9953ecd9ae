"""Samples lie between timed runs, behind queued work, and are few."""

from __future__ import annotations

import contextlib
import itertools
import sys

import pytest
import torch

from fusion_advisor.fuse.decide import step_profile
from fusion_advisor.records import Clocks, ClockSample
from fusion_advisor.timing import clock_sampler, interleaving, wall_timer
from fusion_advisor.timing.clock_sampler import Gauge, Watch, is_at_power_limit, watching
from tests.timing.planted import PlantedTimer


def reader(seen=None):
    numbers = iter(range(10_000))

    def read():
        if seen is not None:
            seen.append("read")
        return ClockSample(sm_mhz=1000 + next(numbers))

    return read


def test_samples_get_rarer_and_belong_to_their_candidate():
    seen = Watch(reader())
    for number in range(50):
        for position in range(2):
            seen.sample(number, position, lambda: None, 10_000_000)
    assert [len(seen.clocks(position).samples) for position in range(2)] == [7, 7]  # rounds 0, 1, 2, 4, 8, 16, 32
    assert [one.sm_mhz for one in seen.clocks(1).samples] == [1001, 1003, 1005, 1007, 1009, 1011, 1013]
    assert seen.clocks(1).sm_mhz == 1007


@pytest.mark.parametrize(("last_ns", "queued"), [(20_000_000, 1), (2_000_000, 3), (1_000, 16), (0, 16)])
def test_short_steps_are_queued_several_times_before_a_reading(last_ns, queued):
    order = []
    Watch(reader(order)).sample(0, 0, lambda: order.append("step"), last_ns)
    assert order == ["step"] * queued + ["read"]


def test_a_long_run_is_repeated_once_only():
    runs = []
    seen = Watch(reader())
    for number in range(6):
        seen.sample(number, 0, lambda: runs.append(1), 3_000_000_000)
    assert len(runs) == len(seen.clocks().samples) == 1


def test_without_a_reader_nothing_is_run():
    seen = Watch(None, missing="no driver")
    seen.sample(0, 0, lambda: pytest.fail("a run for nothing"), 1)
    assert seen.clocks() == Clocks(missing="no driver")
    assert Watch(None).clocks() is None


def test_no_reading_lies_within_a_timed_run():
    timer, order = PlantedTimer(), []

    def run():
        order.append("run")
        timer.now_ns += 1_000_000

    def read():
        timer.now_ns += 7_000_000
        order.append("read")
        return ClockSample()

    seen = Watch(read)
    times = interleaving.interleave(
        [run, run], rounds=6, budget_s=1.0, on_cuda=False, after=lambda n, at, ns: seen.sample(n, at, run, ns), timer=timer
    )
    assert times == [[1_000_000] * 6] * 2
    times = wall_timer.wall_times(
        run, runs=6, budget_s=1.0, on_cuda=False, after=lambda n, ns: seen.sample(n, 0, run, ns), timer=timer
    )
    assert times == [1_000_000] * 6
    assert order.count("read") == 12


def readings(*reasons):
    return Clocks(samples=tuple(ClockSample(reasons=one) for one in reasons))


@pytest.mark.parametrize(
    ("clocks", "is_held"),
    [
        (None, False),
        (Clocks(missing="no driver"), False),
        (readings(None, None), False),
        (readings((), ("sw_power_cap",)), False),
        (readings((), ("sw_power_cap",), ("sw_power_cap", "hw_slowdown")), True),
        (readings(("sw_thermal_slowdown",)), False),
    ],
)
def test_most_readings_must_name_the_power_limit(clocks, is_held):
    assert is_at_power_limit(clocks) == is_held


class Slow(PlantedTimer):
    """Every step makes the time go on."""

    def __init__(self, step_ns):
        super().__init__()
        self.step_ns, self.steps = step_ns, 0

    def step(self):
        self.now_ns += self.step_ns() if callable(self.step_ns) else self.step_ns
        self.steps += 1

    def watch(self, read):
        return Watch(read, now_ns=lambda: self.now_ns)


def at_limit():
    return ClockSample(reasons=("sw_power_cap",))


def gauge_of(watch, wait=lambda: None):
    """A CUDA device whose clocks are those of a planted watch; a CPU has none."""
    return Gauge(watching=lambda *, on_cuda: contextlib.nullcontext(watch if on_cuda else Watch(None)), wait=wait)


def test_a_long_step_is_not_run_again_to_look():
    clock = Slow(3_000_000_000)
    assert not clock.watch(at_limit).runs_at_power_limit(clock.step, wait=lambda: None) and clock.steps == 1


@pytest.mark.parametrize("step_ns", [50_000_000, 2_000_000, 700_000_000])
@pytest.mark.parametrize("from_ns", [0, 250_000_000, 10**12])
def test_the_power_limit_is_looked_for_once_the_step_has_run_for_a_while(step_ns, from_ns):
    clock = Slow(step_ns)

    def read():
        return ClockSample(reasons=("sw_power_cap",) if clock.now_ns >= from_ns else ())

    assert clock.watch(read).runs_at_power_limit(clock.step, wait=lambda: None) == (from_ns < 10**12)
    took_ns = 600_000_000 if from_ns < 10**12 else 300_000_000  # a limit shows by then, or never
    assert took_ns <= clock.now_ns <= took_ns + 3 * max(step_ns, 5_000_000)


def test_nothing_is_run_to_look_for_a_limit_that_nobody_can_tell():
    assert not Watch(None).runs_at_power_limit(lambda: pytest.fail("a run for nothing"), lambda: None)
    assert not clock_sampler.is_held_down([lambda: pytest.fail("a run for nothing")], on_cuda=False)


def test_one_step_that_is_held_down_is_enough_and_steps_are_put_back():
    clock, order = Slow(100_000_000), []
    seen = clock.watch(lambda: ClockSample(reasons=("sw_power_cap",) if order[-1] == "second" else ()))

    def step(name):
        return lambda: (order.append(name), clock.step())

    calls = [step("first"), step("second"), step("third")]
    assert clock_sampler.is_held_down(calls, on_cuda=True, before=lambda: order.append("back"), gauge=gauge_of(seen))
    assert order[1::2] == sorted(order[1::2]) and set(order[1::2]) == {"first", "second"} and set(order[::2]) == {"back"}


@pytest.mark.parametrize("on_cuda", [True, False])
def test_ways_of_calling_a_model_that_is_held_down_run_for_a_while_at_their_turn(on_cuda):
    """The step never settles, so it goes on for all of its patience where it is held down, and for its budget elsewhere."""
    swings = itertools.cycle([40_000_000] * 7 + [60_000_000] * 9)
    clock = Slow(lambda: next(swings))
    (timing,) = step_profile.walls(
        [clock.step], on_cuda=on_cuda, runs=1000, budget_s=2.0, patience=3.0, timer=clock, gauge=gauge_of(clock.watch(at_limit))
    )
    runs_each_turn = clock.steps / len(timing.times_ns)
    if on_cuda:
        assert 6.6 < clock.seconds() < 7.5 and runs_each_turn > 5  # four or so are timed, and half as many are not
    else:
        assert 2.0 < clock.seconds() < 2.4 and runs_each_turn < 2.1


@pytest.mark.parametrize("is_held", [True, False])
def test_what_is_known_of_the_power_limit_is_not_found_out_again(is_held):
    clock = Slow(40_000_000)
    watch = clock.watch(at_limit if not is_held else ClockSample)  # what a look would find is the opposite
    (timing,) = step_profile.walls(
        [clock.step], on_cuda=True, is_held=is_held, runs=20, budget_s=9.0, timer=clock, gauge=gauge_of(watch)
    )
    assert (clock.steps / len(timing.times_ns) > 5) is is_held


def test_ways_that_are_held_down_are_timed_until_they_are_known():
    """A run takes a turn; what it takes comes down by 30 % in the first two dozens of them."""
    clock = Slow(lambda: round(200_000_000 * (1 + 0.3 * max(0.0, 1 - clock.steps / 48))))
    (timing,) = step_profile.walls(
        [clock.step], on_cuda=True, runs=99, budget_s=1e-6, patience=1e9, timer=clock, gauge=gauge_of(clock.watch(at_limit))
    )
    assert 10 < len(timing.times_ns) < 90
    assert timing.ci_high_ns - timing.ci_low_ns <= 0.02 * timing.median_ns


def test_after_rests_ways_are_timed_without_turns_and_without_readings():
    order = []
    clock = Slow(5)
    clock.rest = lambda for_ns: order.append(f"rest {for_ns}")

    def step():
        order.append("step")
        clock.step()

    gauge = gauge_of(Watch(lambda: pytest.fail("a reading")), wait=lambda: order.append("wait"))
    (timing,) = step_profile.rested_walls(
        [step], runs=6, budget_s=1.0, rewind=lambda: order.append("back"), timer=clock, gauge=gauge
    )
    assert (timing.times_ns, timing.rest, timing.clocks) == ((5,) * 6, interleaving.REST, None)
    once = ["back", "wait", "step", "wait"]
    assert order == [*once, *once, *["rest 10", *once] * 6]


def test_a_cpu_has_no_clocks_and_a_missing_library_is_a_sentence(monkeypatch):
    with watching(on_cuda=False) as seen:
        assert seen.clocks() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with watching(on_cuda=True, uuid="x") as seen:
        assert "pip install nvidia-ml-py" in seen.clocks().missing


def test_each_way_of_calling_the_model_gets_its_own_clocks():
    rewound = []
    seen = Watch(reader())
    watches = iter([Watch(None), seen])  # the first one looks for the power limit
    gauge = Gauge(watching=lambda *, on_cuda: contextlib.nullcontext(next(watches)))
    one, other = step_profile.walls(
        [lambda: None, lambda: None], on_cuda=False, runs=6, budget_s=0.0, rewind=lambda: rewound.append(1), gauge=gauge
    )
    assert [len(side.clocks.samples) for side in (one, other)] == [4, 4]
    assert not {sample.sm_mhz for sample in one.clocks.samples} & {sample.sm_mhz for sample in other.clocks.samples}
    # A step that moves its cache on is put back before queued runs too; on a CPU no run goes ahead of a timed one.
    assert len(rewound) == 2 + 12 + 8 * clock_sampler._MOST_QUEUED


@pytest.mark.gpu
def test_a_step_on_the_device_is_seen_at_work():
    work = torch.randn(4096, 4096, device="cuda")
    (timing,) = step_profile.walls([lambda: work @ work], on_cuda=True, runs=20, budget_s=2.0)
    assert timing.clocks is not None and len(timing.clocks.samples) == 6
    assert timing.clocks.sm_mhz is not None and timing.clocks.sm_mhz > 500
    assert all("gpu_idle" not in (one.reasons or ()) for one in timing.clocks.samples)
