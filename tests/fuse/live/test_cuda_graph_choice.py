"""The graph's own row: kept by wall time, refused with its reason, gone without a trace when it does not pay."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.fuse.installed import LastStage
from fusion_advisor.fuse.live.cuda_graph_choice import choose_graph, why_no_graph
from fusion_advisor.fuse.passes.cuda_graph import CUDA_GRAPH
from fusion_advisor.fuse.passes.registry import kept_passes
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.prediction.interval import CALIBRATION
from fusion_advisor.records import GraphBreak, Status
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.interleaving import CannotRecord
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.fuse.cuda_graph.test_replay import graphed_model
from tests.fuse.test_pipeline import keep_all, keep_none, loaded, quick, verdicts  # noqa: F401
from tests.timing.planted import PlantedTimer
from tests.tiny import toy


@pytest.fixture
def chosen():
    """Decide on a simulated clock: a step takes ``plain_ns``, a replay ``graph_ns``."""
    clock = PlantedTimer()

    def choose(plain_ns, graph_ns, recorder=None, device_ns=None, rounds=20, budget_s=1.0, rest=None, on_cuda=False):
        model, args = toy()
        with torch.no_grad():
            fused = graphed_model(model, args, recorder=recorder or FakeRecorder())

        def replays():
            return sum(recording.replays for recording in fused.graphs.recordings)

        def call():
            before = replays()
            fused.dispatch(*args)
            clock.now_ns += graph_ns if replays() > before else plain_ns

        row = choose_graph(
            fused,
            call,
            call,
            min_gain=0.005,
            confidence=0.95,
            rounds=rounds,
            budget_s=budget_s,
            wait=lambda: None,
            on_cuda=on_cuda,
            device_ns=device_ns,
            rest=rest,
            timer=clock,
        )
        return fused, row

    choose.clock = clock
    return choose


def test_a_graph_that_saves_wall_time_stays(chosen):
    fused, row = chosen(10_000_000, 2_000_000)
    assert row.status is Status.KEPT and row.step_delta_ns == -8_000_000
    assert "wall time" in row.reason and row.id == CUDA_GRAPH.id
    assert row.held_bytes > 1 << 20
    assert fused.graphs.is_on and len(fused.graphs.recordings) == 1


def test_the_step_is_expected_to_come_down_to_the_devices_own_time_and_a_call_of_the_graph(chosen):
    assert chosen(10_000_000, 2_000_000)[1].predicted_saving_ns is None
    assert chosen(10_000_000, 2_000_000, device_ns=1_800_000)[1].predicted_saving_ns == 8_200_000 - CALIBRATION.graph_call_ns
    assert chosen(4_000_000, 4_100_000, device_ns=4_050_000)[1].predicted_saving_ns == 0


def test_a_clear_gain_ends_at_a_look_and_one_that_is_open_does_not(chosen):
    _, row = chosen(40_000_000, 8_000_000, rounds=200, budget_s=60.0)
    assert row.status is Status.KEPT
    assert chosen.clock.seconds() < 2.0  # ten rounds of 88 ms, where 200 were allowed
    begun_s = chosen.clock.seconds()
    chosen(40_000_000, 39_800_000, rounds=200, budget_s=60.0)
    assert chosen.clock.seconds() - begun_s > 200 * 0.079  # the step against itself has no noise here, and is timed no further


@pytest.mark.parametrize("rest", [2.0, 0.0])
def test_the_power_limit_is_not_asked_for_again(chosen, rest):
    """A look at it would read the clocks of a GPU, and there is none here."""
    rests = []
    chosen.clock.rest = rests.append
    assert chosen(10_000_000, 2_000_000, rest=rest, on_cuda=True)[1].status is Status.KEPT
    assert set(rests) == ({20_000_000, 4_000_000} if rest else set())


def test_a_gain_that_is_too_little_to_tell_is_looked_at_once_more(chosen, monkeypatch):
    budgets = []
    real = interleaving.interleave

    def interleave(calls, *, budget_s, **more):
        budgets.append(budget_s)
        times = real(calls, budget_s=budget_s, **more)
        if len(budgets) == 1:
            times[0] = [ns + (-1) ** number * 600_000 for number, ns in enumerate(times[0])]
        return times

    monkeypatch.setattr(interleaving, "interleave", interleave)
    fused, row = chosen(10_000_000, 9_500_000)
    assert budgets == [1.0, 2.0] and row.status is Status.KEPT and fused.graphs.is_on
    assert "too little to tell; once more: " in row.reason and row.reason.startswith("wall time ")
    budgets.clear()
    _, row = chosen(10_000_000, 9_990_000)
    assert budgets == [1.0] and row.status is Status.WITHIN_NOISE  # 0.1 % would not stay anyway


@pytest.mark.parametrize(("graph_ns", "status"), [(4_000_000, Status.WITHIN_NOISE), (12_000_000, Status.SLOWER)])
def test_a_graph_that_saves_nothing_goes_and_frees_its_memory(chosen, graph_ns, status):
    fused, row = chosen(4_000_000, graph_ns)
    assert row.status is status
    assert not fused.graphs.is_on and fused.graphs.recordings == ()


def test_a_step_that_cannot_be_recorded_says_why(chosen):
    recorder = FakeRecorder()
    recorder.fails = CannotRecord("stream is capturing")
    with pytest.warns(UserWarning, match="without its CUDA graph"):
        fused, row = chosen(100, 100, recorder)
    assert row.status is Status.NOT_REPLACED and "stream is capturing" in row.reason
    assert not fused.graphs.is_on and row.step_delta_ns is None


def test_breaks_are_named():
    assert why_no_graph([], (1,)) is None
    assert "model.py:12" in why_no_graph([GraphBreak(reason="item()", source="model.py:12")], (1, 1))
    assert "2 graphs" in why_no_graph([], (1, 1))
    assert "runs its captured graph 3 times" in why_no_graph([], (3,))


def test_the_report_has_a_row_and_the_model_replays(loaded, quick):  # noqa: F811
    recorder = FakeRecorder()
    last = LastStage(graph_recorder=lambda bench: recorder, choose_graph=kept_graph)
    run = apply_workload(loaded, quick, instruments=verdicts(keep_all), last=last)
    row = run.report.rewrites[-1]
    assert row.id == CUDA_GRAPH.id and row.status is Status.KEPT and row.held_bytes > 0
    assert row.predicted_low_ns < 3_000_000 < row.predicted_high_ns
    assert CUDA_GRAPH.id not in kept_passes(run.report.rewrites)
    assert load_report(dump_report(run.report)) == run.report
    assert all(fusion.receipt.launches_after == fusion.receipt.sites_replaced for fusion in run.report.fusions)
    replayed = recorder.replayed
    with torch.no_grad():
        expected = run.fused._original(*loaded.args)
        torch.testing.assert_close(loaded.model(*loaded.args), expected, rtol=1e-5, atol=1e-5)
    assert recorder.replayed == replayed + 1
    run.revert()
    assert "_compiled_call_impl" not in loaded.model.__dict__ and run.fused.graphs.recordings == ()


def test_a_graph_alone_may_stay(loaded, quick):  # noqa: F811
    last = LastStage(graph_recorder=lambda bench: FakeRecorder(), choose_graph=kept_graph)
    run = apply_workload(loaded, quick, instruments=verdicts(keep_none), last=last)
    assert run.report.after.label == "fused" and run.report.model_check.is_passed
    assert "_compiled_call_impl" in loaded.model.__dict__
    run.revert()


def test_no_graph_no_row(loaded, quick):  # noqa: F811
    from dataclasses import replace

    last = LastStage(graph_recorder=lambda bench: FakeRecorder())
    run = apply_workload(loaded, replace(quick, graph=False), instruments=verdicts(keep_all), last=last)
    assert all(row.id != CUDA_GRAPH.id for row in run.report.rewrites) and run.fused.graphs is None
    run.revert()


def kept_graph(fused, call, without, **options):
    """Decide as if it had paid."""
    from dataclasses import replace

    options |= {"rounds": 6, "budget_s": 0.0}
    row = choose_graph(fused, call, without, **options)
    if not fused.graphs.is_on:
        fused.graphs.is_on = True
        with torch.no_grad():
            call(), call()
    return replace(row, status=Status.KEPT, predicted_saving_ns=3_000_000)
