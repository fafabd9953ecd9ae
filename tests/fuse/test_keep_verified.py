"""``keep="verified"``: all whose numbers pass stays, whatever its time; ``launches`` tells how often kernels ran."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

import fusion_advisor
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.errors import UsageError
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.plan.options import ApplyOptions, Budgets
from fusion_advisor.fuse.rewrite.graph_rewriter import fused_call
from fusion_advisor.fuse.rewrite.launch_count import tally_of
from fusion_advisor.records import Status, TensorMeta
from fusion_advisor.report.shared_rows import caveats
from fusion_advisor.timing.wall_timer import as_timing
from fusion_advisor.workload.load import describe_live
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.fuse.test_pipeline import Model
from tests.tiny import BANDWIDTH

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def _quick(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def slow_walls(calls, **_):
    """Eager is the first of the calls, and all others look a thousand times slower."""
    return [as_timing([10**9 if number == 0 else 10**12] * 6, "wall") for number, _ in enumerate(calls)]


QUICK = {
    "warmup": 1, "runs": 3, "min_share": 1.0, "budgets": Budgets(wall_s=0.02),
    # Memory so slow that no chain has anything to save: no time may decide.
    "bandwidth": replace(BANDWIDTH, copy_bytes_per_s=1),
}  # fmt: skip


def test_slower_rewrites_stay_if_their_numbers_pass():
    def never(*_, **__):
        raise AssertionError("a decision was timed")

    instruments = Instruments(decide=never, compare_alone=never, saving_alone_ns=never, walls=slow_walls)
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(2, 48, 64)
    expected = model(x)
    loaded = describe_live(model, (x,))
    with (
        torch.no_grad(),
        apply_workload(loaded, ApplyOptions(keep="verified", compile=False, **QUICK), instruments=instruments).fused as fused,
    ):
        report = fused.report
        assert report.after.wall.median_ns == 10**12
        tried = [row for row in (*report.rewrites, *report.fusions) if row.status is not Status.NOT_REPLACED]
        assert len([row for row in report.fusions if row.status is Status.KEPT]) == 2
        assert all(row.status is Status.KEPT for row in tried), [(row.id, row.reason) for row in tried]
        assert all(row.step_delta_ns is None and "not chosen by time" in row.reason for row in tried)
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
        assert fused.launches == 2
    assert any("not chosen by time" in line for line in caveats(report))
    assert any("not chosen by time" in note for note in report.notes)
    assert report.noise_share is None and report.keep == "verified"


def test_launches_count_from_apply_on_and_not_while_reverted():
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(2, 48, 64)
    with torch.no_grad():
        fused = fusion_advisor.apply(model, x, keep="verified", **QUICK)
        assert fused.launches == 0
        for calls in (1, 2, 3):
            model(x)
            assert fused.launches == 2 * calls
        with pytest.warns(UserWarning, match="original ops"):
            model(torch.randn(1, 48, 64))
        assert fused.launches == 6
        fused.revert()
        model(x)
        assert fused.launches == 6
        fused.apply()
        assert fused.launches == 0
        model(x)
        assert fused.launches == 2


class Silent(FakeRecorder):
    """Replays without a call of Python's, as a device does."""

    def record(self, call):
        _, result = super().record(call)
        return lambda: None, result


def test_a_replay_counts_the_launches_that_it_holds_and_a_recording_counts_none():
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(2, 48, 64)
    with torch.no_grad():
        plain = fusion_advisor.apply(model, x, keep="verified", **QUICK)
        (module,) = plain._rewritten.modules
        plain.revert()
        live = capture_regions(model, (x,), {})
        fused = FusedModel(model, live.regions, [module], (x,), {}, graphs=Graphs(Silent()), live=live)
        fused.apply()
        counts = []
        for _ in range(5):  # launched, recorded and replayed, replayed ...
            model(x)
            counts.append(fused.launches)
    assert fused.graphs.recordings[0].launches == 2
    assert counts == [2, 4, 6, 8, 10]


def test_each_call_counts_in_its_own_tally():
    meta = TensorMeta(shape=(3,), stride=(1,), dtype="float32", device="cpu")
    ran = []
    calls = [fused_call(f"fa_{n}", lambda *tensors: ran.append(tensors), [meta], [meta]) for n in range(2)]
    calls[0](torch.ones(3)), calls[0](torch.ones(3)), calls[1](torch.ones(3))
    assert [tally_of(call).launches for call in calls] == [2, 1] and len(ran) == 3


def test_an_unknown_rule_is_a_mistake_of_the_users():
    with pytest.raises(UsageError, match="--keep fast is not known"):
        ApplyOptions(keep="fast")
    assert ApplyOptions().is_timed and not ApplyOptions(keep="verified").is_timed


class Scan(torch.nn.Module):
    """A state per token from the ones before it, as Mamba's plain PyTorch, and a gate on the result."""

    def forward(self, decay, x):
        from torch._higher_order_ops.associative_scan import associative_scan

        if torch.compiler.is_compiling():

            def combine(left, right):
                return left[0] * right[0], right[0] * left[1] + right[1]

            _, states = associative_scan(combine, (decay, x), dim=1, combine_mode="generic")
        else:
            state, each = torch.zeros_like(x[:, 0]), []
            for step in range(x.shape[1]):
                state = decay[:, step] * state + x[:, step]
                each.append(state)
            states = torch.stack(each, 1)
        return torch.nn.functional.silu(states) * x


@pytest.mark.slow
def test_an_associative_scan_is_fused():
    torch.manual_seed(0)
    model, given = Scan().eval(), (torch.rand(2, 16, 32), torch.randn(2, 16, 32))
    expected = model(*given)
    with torch.no_grad(), fusion_advisor.apply(model, given, keep="verified", compile=False) as fused:
        torch.testing.assert_close(model(*given), expected)
        assert fused.launches > 0
        other = (torch.rand(2, 16, 32), torch.randn(2, 16, 32))
        launched = fused.launches
        found = model(*other)
        assert fused.launches > launched
    torch.testing.assert_close(found, model(*other))
