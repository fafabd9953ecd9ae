"""Steps that meet other ranks are timed as CUDA graphs of all ranks, or launched on all, and end with the ranks."""

from __future__ import annotations

import gc
import random
from types import SimpleNamespace

import pytest

from fusion_advisor.errors import RankFailed, RanksDiffer
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.decide.quick import on_top_quickly
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.decide.step_runner import StepRunner
from fusion_advisor.ranks.instruments import AgreedTimer, instruments_of
from fusion_advisor.ranks.recording import TimedRecorder, records_together
from fusion_advisor.records import Status
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.interleaving import CannotRecord
from tests.ranks.two import both
from tests.timing.planted import PlantedTimer
from tests.tiny import profiled

LAUNCHED_NS = 20_000_000
"""A step of 3.5 ms on the device that Python launches op by op."""


class PlantedStep:
    """A step whose kernels take so long, and whose launches take far longer and vary from run to run."""

    def __init__(self, timer, seed, kernels_ns):
        self.timer, self.kernels_ns = timer, kernels_ns
        self.launches = random.Random(seed)

    def __call__(self):
        self.timer.now_ns += round(LAUNCHED_NS * self.launches.uniform(1.0, 1.2))

    def replay(self):
        self.timer.now_ns += self.kernels_ns


def verdict_of(ranks, saved_ns, failing=()):
    """What the ranks decide on a rewrite that saves so much on each; returns the verdict, and how the step was timed."""
    own = PlantedTimer()
    before = PlantedStep(own, ranks.rank, 3_500_000 + 200_000 * ranks.rank)
    after = PlantedStep(own, 10 + ranks.rank, before.kernels_ns - saved_ns[ranks.rank])

    def record(call, *, pool, before, around, finish, is_warm):
        if ranks.rank in failing:
            raise CannotRecord("operation not permitted")
        return call.replay

    bench = SimpleNamespace(
        on_cuda=False, timer=AgreedTimer(own, ranks), rest=0.0, recorder=TimedRecorder(ranks, record),
        live=SimpleNamespace(written=SimpleNamespace(rewind=lambda: None)),
    )  # fmt: skip
    runner = StepRunner(bench)
    runner.method = "cuda_graph"  # as where the bench is on a GPU
    found = on_top_quickly(runner, before, after, name="G2", min_gain=0.005, confidence=0.95, budget_s=9.0)
    return found, runner.method


def test_a_gain_that_launches_hide_is_seen_in_graphs_of_all_ranks():
    first, second = both(lambda ranks: verdict_of(ranks, (97_000, 97_000)))
    assert first == second and first[1] == "cuda_graph"
    assert first[0].status is Status.KEPT and first[0].delta_ns == -97_000


def test_the_slowest_rank_decides():
    first, second = both(lambda ranks: verdict_of(ranks, (97_000, -50_000)))
    assert first == second and first[0].status is Status.SLOWER and first[0].delta_ns == 50_000


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}])
def test_where_one_rank_cannot_record_all_time_launches(failing):
    first, second = both(lambda ranks: verdict_of(ranks, (97_000, 97_000), failing))
    assert first == second and first[1] == "cuda_events" and first[0].status is Status.WITHIN_NOISE


def test_an_error_that_is_no_refusal_ends_the_other_rank_with_its_reason():
    def work(ranks):
        def record(_call):
            if ranks.rank:
                raise MemoryError("of rank 1")
            return lambda: None

        TimedRecorder(ranks, record)(lambda: None)

    first, second = both(work)
    assert isinstance(second, MemoryError)
    assert isinstance(first, RankFailed) and "rank 1 ended the run: MemoryError: of rank 1" in str(first)


def test_a_rank_that_does_not_come_to_record_is_found_out():
    def work(ranks):
        return ranks.gather("timed run", 1) if ranks.rank else TimedRecorder(ranks, lambda call: call)(lambda: None)

    assert all(isinstance(one, RanksDiffer) for one in both(work))


def test_graphs_go_with_their_replays_and_with_the_ranks():
    def work(ranks):
        gone = []

        class Graph:
            def __call__(self):
                return "played"

            def __del__(self):
                gone.append(1)

        record = TimedRecorder(ranks, lambda _call: Graph())
        record(lambda: None)
        gc.collect()
        after_first = len(gone)
        kept = record(lambda: None)
        kept()
        ranks.release()
        with pytest.raises(RuntimeError, match="parted"):
            kept()
        again = record(lambda: None)  # noted anew
        ranks.release()
        with pytest.raises(RuntimeError, match="parted"):
            again()
        return after_first, len(gone)

    assert both(work) == [(1, 3), (1, 3)]


def test_benches_are_given_the_ranks_recorder_and_one_process_its_own():
    def work(ranks):
        asked = []
        measured = Instruments(record=lambda call, **how: asked.append(how) or call)
        made = instruments_of(ranks, on_cuda=False, on_capture=lambda _: None, measured=measured).record
        made(lambda: None, pool=5)
        nobody = instruments_of(ranks, on_cuda=True, on_capture=lambda _: None)  # no group of NCCL was joined
        return isinstance(made, TimedRecorder), asked, nobody.record

    assert both(work) == [(True, [{"pool": 5}], None)] * 2
    _, _, live = profiled("toy")
    bench = Bench(live, on_cuda=False)
    assert bench.is_alone and bench.recorder is interleaving.recorded
    assert Bench(live, on_cuda=False, record=max).recorder is max


@pytest.mark.parametrize(
    ("config", "is_recorded"), [("cpu:gloo,cuda:nccl", True), ("cuda:nccl", True), ("cpu:gloo,cuda:gloo", False), ("", False)]
)
def test_only_nccl_is_recorded(config, is_recorded):
    assert records_together(config) is is_recorded


def test_a_process_of_no_group_records_nothing_together():
    assert records_together() is False
