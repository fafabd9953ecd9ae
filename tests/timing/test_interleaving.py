"""Interleaved timing on a fake clock: every candidate gets its own times, and none a better place than another."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import time
import weakref
from collections import Counter

import pytest
import torch

from fusion_advisor.runtime.torch_internals import cuda_state
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.host_timer import WallTimer
from fusion_advisor.timing.interleaving import compare_alone, difference, interleave, recorded
from tests.timing.planted import PlantedTimer


def taking(clock, cost_ns, seen=None, name=None):
    def call():
        clock.now_ns += cost_ns() if callable(cost_ns) else cost_ns
        if seen is not None:
            seen.append(name)

    return call


def test_every_candidate_keeps_its_own_times(clock):
    times = interleave([taking(clock, cost) for cost in (10, 20, 30)], rounds=7, budget_s=1e9, on_cuda=False, timer=clock)
    assert times == [[10] * 7, [20] * 7, [30] * 7]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 11])
def test_no_candidate_has_a_better_place_than_another(clock, count):
    seen, rounds = [], 200
    interleave([taking(clock, 1, seen, name) for name in range(count)], rounds=rounds, budget_s=1e9, on_cuda=False, timer=clock)
    runs = seen[count:]  # the first pass warms up
    assert runs[::2] == runs[1::2]
    order = [runs[start : start + 2 * count : 2] for start in range(0, len(runs), 2 * count)]
    assert len(order) == rounds
    assert all(sorted(turn) == list(range(count)) for turn in order)
    assert order[1::2] == [turn[::-1] for turn in order[::2]]
    follows = Counter(pair for turn in order for pair in itertools.pairwise(turn))
    assert all(follows[one, two] == follows[two, one] for one in range(count) for two in range(count))
    fair = rounds / count
    assert all(0.3 * fair < follows[pair] < 2 * fair for pair in itertools.permutations(range(count), 2))
    places = Counter((place, name) for turn in order for place, name in enumerate(turn))
    assert all(0.3 * fair < places[pair] < 2 * fair for pair in itertools.product(range(count), repeat=2))


def test_the_order_is_the_same_in_each_run(clock):
    orders = []
    for _ in range(2):
        seen = []
        interleave([taking(clock, 1, seen, name) for name in range(6)], rounds=9, budget_s=1e9, on_cuda=False, timer=clock)
        orders.append(seen)
    assert orders[0] == orders[1]


def test_a_clock_that_follows_slowly_makes_no_great_difference(clock):
    """Slow steps draw less and leave a higher clock, which goes down within 30 ms: the stacks' neighbours are not alike."""
    frequency = [1.0]

    def step(base_ns):
        def call():
            target = 0.85 + 0.14 * base_ns / 14e6
            arrived = target + (frequency[0] - target) * math.exp(-base_ns / 30e6)
            clock.now_ns += round(2 * base_ns / (frequency[0] + arrived))
            frequency[0] = arrived

        return call

    calls = [step(14e6), *(step(14e6 * (1 - 0.04 * number)) for number in range(9))]
    times = interleave(calls, rounds=160, budget_s=1e9, on_cuda=False, timer=clock)
    assert interleaving.noise_ns(times[0], times[1]) < 0.004 * 14e6


def test_a_drift_hits_all_alike(clock):
    def drifting(cost):
        return lambda: cost + clock.now_ns // 1000

    before, after = interleave(
        [taking(clock, drifting(1000)), taking(clock, drifting(1000))], rounds=80, budget_s=1e9, on_cuda=False, timer=clock
    )
    change = difference(before, after)
    assert change.low_ns <= 0 <= change.high_ns


@pytest.mark.parametrize("shares", [(0.9, 1.1), (1.1, 0.9)])
def test_what_ran_before_changes_no_difference(clock, shares):
    """A device whose clock follows the run before: one candidate slows the next one down, the other speeds it up."""
    last = [1.0]

    def held(cost, share):
        def call():
            clock.now_ns += round(cost * last[0])
            last[0] = share

        return call

    calls = [held(1000, shares[0]), held(1000, shares[0]), held(800, shares[1])]
    control, before, after = interleave(calls, rounds=30, budget_s=1e9, on_cuda=False, timer=clock)
    assert difference(control, before) == interleaving.Difference(median_ns=0, low_ns=0, high_ns=0)
    change = round(800 * shares[1] - 1000 * shares[0])  # each as fast as it is behind itself
    assert difference(before, after) == interleaving.Difference(median_ns=change, low_ns=change, high_ns=change)


def test_a_turn_lasts_as_long_as_asked_behind_untimed_runs(clock):
    seen, ends = [], []
    costs = {"short": 5_000_000, "middle": 100_000_000, "long": 900_000_000}
    calls = [taking(clock, cost, seen, name) for name, cost in costs.items()]
    times = interleave(
        calls, rounds=4, budget_s=1e9, turn_s=0.3, on_cuda=False, timer=clock, before=lambda: seen.append("back"),
        after=lambda number, position, ns: ends.append((number, position, ns)),
    )  # fmt: skip
    assert times == [[cost] * 4 for cost in costs.values()]
    runs = seen[1::2]
    assert set(seen[::2]) == {"back"} and runs[:6] == ["short"] * 2 + ["middle"] * 2 + ["long"] * 2
    turns = [(name, len(list(group))) for name, group in itertools.groupby(runs[6:])]
    assert set(turns) <= {("short", 90), ("middle", 5), ("long", 2), ("short", 180), ("middle", 10), ("long", 4)}
    assert Counter(runs[6:]) == {"short": 360, "middle": 20, "long": 8}
    assert len(ends) == 12 and {position for _, position, _ in ends} == {0, 1, 2}


def test_what_disturbs_a_few_runs_of_a_turn_is_left_out(clock):
    number = itertools.count()

    def disturbed():
        return 10_000_000 + (500_000_000 if next(number) % 6 == 3 else 0) - (9_000_000 if next(number) % 7 == 5 else 0)

    ((first, *_),) = interleave([taking(clock, disturbed)], rounds=1, budget_s=1e9, turn_s=0.3, on_cuda=False, timer=clock)
    assert first == 10_000_000


@pytest.mark.parametrize("rest", [2.0, 0.5])
def test_ahead_of_each_run_the_device_rests_as_long_as_the_one_before_tells(rest):
    seen = []
    clock = PlantedTimer(rest=seen.append)
    costs = {"short": 1000, "long": 6000}
    calls = [taking(clock, cost, seen, name) for name, cost in costs.items()]
    times = interleave(calls, rounds=6, budget_s=1e9, rest=rest, on_cuda=False, timer=clock)
    assert times == [[1000] * 6, [6000] * 6]
    assert seen[:4] == ["short"] * 2 + ["long"] * 2
    rests, runs = seen[4::2], seen[5::2]
    assert Counter(runs) == {"short": 6, "long": 6}  # none is untimed
    assert rests == [round(rest * costs[name]) for name in ("long", *runs[:-1])]


def test_a_rest_is_as_long_as_asked():
    start = time.perf_counter_ns()
    WallTimer().rest(2_000_000)
    assert time.perf_counter_ns() - start >= 2_000_000


def test_what_a_rest_gives_back_holds_no_run_down():
    """A device that saves up energy while it is idle, and runs slower without any left."""
    saved = [0.0]

    def idle(for_ns):
        saved[0] = min(60e6, saved[0] + for_ns)

    clock = PlantedTimer(rest=idle)

    def step(cost_ns):
        def call():
            free_ns = min(cost_ns, saved[0])
            saved[0] -= free_ns
            clock.now_ns += round(free_ns + 1.3 * (cost_ns - free_ns))

        return call

    calls = [step(50_000_000), step(48_000_000)]
    held, rested = (interleave(calls, rounds=6, budget_s=1e9, on_cuda=False, timer=clock, rest=rest) for rest in (0.0, 2.0))
    assert difference(*rested).median_ns == -2_000_000
    assert difference(*held).median_ns == -2_600_000


@pytest.mark.parametrize(("turn_s", "is_found"), [(0.0, False), (0.2, True)])
def test_a_turn_lasts_until_the_clock_is_where_a_step_keeps_it(clock, turn_s, is_found):
    """Steps of 50 ms on a device whose clock follows what their energy allows within 60 ms."""
    level = [1.0]

    def step(energy):
        def call():
            target = 1 / energy
            level[0] = target + (level[0] - target) * math.exp(-50 / 60)
            clock.now_ns += round(50e6 / level[0])

        return call

    before, after = interleave([step(1.0), step(1.04)], rounds=8, budget_s=1e9, turn_s=turn_s, on_cuda=False, timer=clock)
    found = difference(before, after).median_ns
    assert (found == pytest.approx(0.04 * 50e6, rel=0.08)) == is_found and found < 0.04 * 50e6


def test_the_budget_ends_the_rounds_but_the_least_are_made(clock):
    calls = [taking(clock, 10**9), taking(clock, 10**9)]
    assert len(interleave(calls, rounds=50, budget_s=0.5, on_cuda=False, timer=clock)[0]) == 6
    assert len(interleave(calls, rounds=50, budget_s=0.5, on_cuda=False, timer=clock, least=3)[0]) == 3
    assert len(interleave(calls, rounds=50, budget_s=41.0, on_cuda=False, timer=clock)[0]) == 11
    assert len(interleave(calls, rounds=4, budget_s=1e9, on_cuda=False, timer=clock)[0]) == 4


def test_a_least_time_goes_beyond_rounds_and_budget(clock):
    calls = [taking(clock, 10**9), taking(clock, 10**9)]
    assert len(interleave(calls, rounds=4, budget_s=0.5, least_s=40.0, on_cuda=False, timer=clock)[0]) == 10
    assert len(interleave(calls, rounds=12, budget_s=1e9, least_s=40.0, on_cuda=False, timer=clock)[0]) == 12


def test_times_that_are_not_settled_go_on_up_to_a_limit(clock):
    calls, asked = [taking(clock, 10**9), taking(clock, 10**9)], []

    def settled_at(rounds):
        def is_settled(times):
            asked.append(len(times[0]))
            return len(times[0]) >= rounds

        return is_settled

    def rounds_of(**options):
        return len(interleave(calls, rounds=50, budget_s=30.0, on_cuda=False, timer=clock, **options)[0])

    assert rounds_of() == rounds_of(is_settled=settled_at(20)) == 8
    assert asked == []
    assert rounds_of(most_s=90.0, is_settled=settled_at(8)) == 8
    assert rounds_of(most_s=90.0, is_settled=settled_at(12)) == 12
    assert rounds_of(most_s=90.0, is_settled=settled_at(99)) == 23
    assert min(asked) == 8


def test_a_step_is_quiet_when_it_does_not_differ_from_itself():
    quiet, same = interleaving.is_quiet(0.01, 0.95), [1000 + number % 3 for number in range(20)]
    assert quiet([same, same, []])
    assert quiet([same, [value + 8 for value in same]])
    assert not quiet([same, [value + 12 for value in same]])
    assert not quiet([same, [value - 12 for value in same]])
    assert interleaving.noise_ns(same, [value - 12 for value in same]) == 12


def test_a_difference_is_after_minus_before():
    change = difference([100] * 20, [70] * 20)
    assert (change.median_ns, change.low_ns, change.high_ns) == (-30, -30, -30)
    assert difference([70] * 20, [100] * 20).median_ns == 30


def test_rounds_are_paired():
    """A round that was slow for both is no difference."""
    before = [100 * (1 + 10 * (number % 5)) for number in range(40)]
    found = difference(before, [value * 9 // 10 for value in before])
    assert found == interleaving.Difference(median_ns=-210, low_ns=-210, high_ns=-210)


@pytest.mark.parametrize("cost", [50, 40_000, 5_000_000])
def test_alone_the_sides_are_never_swapped_and_times_are_per_call(clock, cost):
    before, after = compare_alone(taking(clock, 3 * cost), taking(clock, cost), on_cuda=False, timer=clock, budget_s=1e9)
    assert (before.median_ns, after.median_ns) == (3 * cost, cost)
    assert before.method == after.method == "wall"
    assert len(before.times_ns) == len(after.times_ns) == 40


def test_a_real_call_that_does_twice_the_work_takes_longer():
    x = torch.randn(200, 200)

    def once():
        return x @ x

    def thrice():
        return x @ x @ x @ x

    slow, fast = compare_alone(thrice, once, on_cuda=False, budget_s=0.2)
    assert slow.median_ns > 1.3 * fast.median_ns


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="records a CUDA graph, and this machine has no CUDA device")
def test_a_workspace_of_the_warm_up_is_not_recorded(monkeypatch):
    """Streams come from a pool: what warms a call up may run on the stream that captures it."""
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((64, 4096), (4096, 256), (256,)))
    want, out = torch.addmm(bias, x, weight), torch.empty(64, 256, device="cuda", dtype=torch.bfloat16)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        bias + 1
    capturing = torch.cuda.graph.default_capture_stream
    monkeypatch.setattr(torch.cuda, "Stream", lambda **_: capturing)
    replay = recorded(lambda: torch.addmm(bias, x, weight, out=out), around=cuda_state.own_gemm_workspace)
    torch.cuda.empty_cache()
    guard = torch.zeros(64 * 2**20, dtype=torch.uint8, device="cuda")
    replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)
    assert not guard.any()


def test_what_is_entered_around_the_capture_is_not_entered_for_the_warm_up(monkeypatch):
    seen, modes = [], []

    class Around:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            seen.append(f"+{self.name}")

        def __exit__(self, *_):
            seen.append(f"-{self.name}")

    class Graph:
        def __init__(self, *, keep_graph):
            self.is_kept = keep_graph

        def replay(self):
            seen.append("replay")

        def instantiate(self):
            seen.append("instantiate")

    class Stream:
        def wait_stream(self, _):
            seen.append("waits")

    fakes = {
        "Stream": Stream, "current_stream": Stream, "stream": lambda _: Around("stream"), "CUDAGraph": Graph,
        "graph": lambda graph, pool, capture_error_mode: modes.append(capture_error_mode) or Around("capture"),
        "synchronize": lambda: None,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    recorded(lambda: seen.append("run"), around=lambda: Around("own"))()
    captured = ["+own", "+stream", "+capture", "run", "-capture", "-stream", "-own"]
    made = ["waits", "+stream", "run", "run", "-stream", "waits", *captured]
    assert seen == [*made, "replay"]
    seen.clear()
    recorded(lambda: seen.append("run"), around=lambda: Around("own"), finish=lambda graph: seen.append(graph.is_kept))()
    assert seen == [*made, True, "instantiate", "replay"]
    recorded(lambda: None, error_mode="thread_local")
    assert modes == ["global", "global", "thread_local"]
    seen.clear()
    recorded(lambda: seen.append("run"), around=lambda: Around("own"), is_warm=True)()
    assert seen == [*captured, "replay"]
    constant = Stream()
    read, replay = weakref.ref(constant), recorded(functools.partial(str, constant))
    del constant
    gc.collect()
    assert read() is not None  # a graph reads what belongs to its call
    del replay
    gc.collect()
    assert read() is None


def wait(clock):
    clock.now_ns += 1_000_000


def test_a_candidate_that_is_left_out_has_no_further_rounds_and_the_others_no_more_than_before():
    clock = PlantedTimer()
    calls = [lambda: wait(clock)] * 4

    def still_open(times):
        return {0, 1} if len(times[0]) >= 10 else None

    plain = interleaving.interleave(calls, rounds=200, budget_s=0.1, on_cuda=False, timer=clock)
    times = interleaving.interleave(calls, rounds=200, budget_s=0.1, on_cuda=False, still_open=still_open, timer=clock)
    assert [len(series) for series in times[2:]] == [10, 10]
    assert len(times[0]) == len(times[1]) and abs(len(times[0]) - len(plain[0])) <= 1


def test_nothing_is_left_out_before_the_least_time():
    clock = PlantedTimer()
    calls = [lambda: wait(clock)] * 2
    times = interleaving.interleave(
        calls, rounds=10, budget_s=0.0, least_s=1.0, on_cuda=False, still_open=lambda _: (), timer=clock
    )
    assert 1.0 <= sum(map(sum, times)) / 1e9 * 2 < 1.2
