"""Samples lie between timed runs, behind queued work, and are few."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch

from fusion_advisor.fuse.decide import step_profile
from fusion_advisor.records import Clocks, ClockSample
from fusion_advisor.timing import clock_sampler, interleaving, wall_timer
from fusion_advisor.timing.clock_sampler import Watch, is_at_power_limit, watching
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


def test_no_reading_lies_within_a_timed_run(monkeypatch):
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


class Slow:
    """Stands for ``time`` in ``watch``: every queued step makes it go on."""

    def __init__(self, step_ns):
        self.step_ns, self.now_ns, self.steps = step_ns, 0, 0

    def perf_counter_ns(self):
        return self.now_ns

    def step(self):
        self.now_ns += self.step_ns
        self.steps += 1


def test_a_long_step_is_not_run_again_to_look(monkeypatch):
    clock = Slow(3_000_000_000)
    monkeypatch.setattr(clock_sampler, "time", clock)
    seen = Watch(lambda: ClockSample(reasons=("sw_power_cap",)))
    assert not seen.runs_at_power_limit(clock.step, wait=lambda: None) and clock.steps == 1


@pytest.mark.parametrize("step_ns", [50_000_000, 2_000_000, 700_000_000])
@pytest.mark.parametrize("from_ns", [0, 250_000_000, 10**12])
def test_the_power_limit_is_looked_for_once_the_step_has_run_for_a_while(monkeypatch, step_ns, from_ns):
    clock = Slow(step_ns)
    monkeypatch.setattr(clock_sampler, "time", clock)

    def read():
        return ClockSample(reasons=("sw_power_cap",) if clock.now_ns >= from_ns else ())

    assert Watch(read).runs_at_power_limit(clock.step, wait=lambda: None) == (from_ns < 10**12)
    assert 600_000_000 <= clock.now_ns <= 600_000_000 + 3 * max(step_ns, 5_000_000)


def test_nothing_is_run_to_look_for_a_limit_that_nobody_can_tell():
    assert not Watch(None).runs_at_power_limit(lambda: pytest.fail("a run for nothing"), lambda: None)
    assert not clock_sampler.is_held_down([lambda: pytest.fail("a run for nothing")], on_cuda=False)


def test_one_step_that_is_held_down_is_enough_and_steps_are_put_back(monkeypatch):
    clock, order = Slow(100_000_000), []
    monkeypatch.setattr(clock_sampler, "time", clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seen = Watch(lambda: ClockSample(reasons=("sw_power_cap",) if order[-1] == "second" else ()))
    monkeypatch.setattr(clock_sampler, "watching", lambda *, on_cuda: contextlib.nullcontext(seen))

    def step(name):
        return lambda: (order.append(name), clock.step())

    calls = [step("first"), step("second"), step("third")]
    assert clock_sampler.is_held_down(calls, on_cuda=True, before=lambda: order.append("back"))
    assert order[1::2] == sorted(order[1::2]) and set(order[1::2]) == {"first", "second"} and set(order[::2]) == {"back"}


def test_ways_of_calling_a_model_that_is_held_down_run_for_a_while_at_their_turn(monkeypatch):
    asked = []
    held = Watch(lambda: ClockSample(reasons=("sw_power_cap",)))
    monkeypatch.setattr(held, "runs_at_power_limit", lambda queue, wait: asked.append(queue) or True)
    for module in (step_profile, clock_sampler):
        monkeypatch.setattr(module, "watching", lambda *, on_cuda: contextlib.nullcontext(held if on_cuda else Watch(None)))
    monkeypatch.setattr(step_profile, "interleave", lambda *_, turn_s, most_s, **__: [[round(turn_s * 1e9), round(most_s * 1e9)]])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for on_cuda, expected_ns in ((True, (200_000_000, 6_000_000_000)), (False, (0, 0))):
        (timing,) = step_profile.walls([lambda: None], on_cuda=on_cuda, runs=6, budget_s=2.0, patience=3.0)
        assert timing.times_ns == expected_ns and len(asked) == 1


def test_ways_that_are_held_down_are_timed_until_they_are_known(monkeypatch):
    monkeypatch.setattr(step_profile, "is_held_down", lambda *_, **__: True)
    swings = iter([*range(0, 60, 6), *[0] * 90])

    def timed(timer, run, before, count):
        return [10_000 + 10 * next(swings)] * count

    monkeypatch.setattr(interleaving, "_timed_on_host", timed)
    monkeypatch.setattr(step_profile, "TURN_S", 1e-9)
    (timing,) = step_profile.walls([lambda: None], on_cuda=False, runs=99, budget_s=1e-6, patience=1e9)
    assert 10 < len(timing.times_ns) < 40
    assert timing.ci_high_ns - timing.ci_low_ns <= 0.02 * timing.median_ns


def test_after_rests_ways_are_timed_without_turns_and_without_readings(monkeypatch):
    asked, order = {}, []

    def timed(calls, *, before, **more):
        asked.update(more)
        before()
        calls[0]()
        return [[3, 4, 5]]

    monkeypatch.setattr(step_profile, "interleave", timed)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    calls = [lambda: order.append("step")]
    (timing,) = step_profile.rested_walls(calls, runs=6, budget_s=1.0, rewind=lambda: order.append("back"))
    assert (timing.times_ns, timing.rest, timing.clocks) == ((3, 4, 5), interleaving.REST, None)
    assert asked == {"rounds": 6, "budget_s": 1.0, "rest": interleaving.REST, "on_cuda": False}
    assert order == ["back", "wait", "step", "wait"]


def test_a_cpu_has_no_clocks_and_a_missing_library_is_a_sentence(monkeypatch):
    with watching(on_cuda=False) as seen:
        assert seen.clocks() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"uuid": "x"}))
    with watching(on_cuda=True) as seen:
        assert "pip install nvidia-ml-py" in seen.clocks().missing


def test_each_way_of_calling_the_model_gets_its_own_clocks(monkeypatch):
    rewound = []
    seen = Watch(reader())

    def watched(*, on_cuda):
        return contextlib.nullcontext(seen)

    monkeypatch.setattr(step_profile, "watching", watched)
    one, other = step_profile.walls(
        [lambda: None, lambda: None], on_cuda=False, runs=6, budget_s=0.0, rewind=lambda: rewound.append(1)
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
