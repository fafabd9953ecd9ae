"""The stage that merges GEMMs, in the whole loop on a CPU: its row, its memory, its plan, and what a "no" leaves behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import fusion_advisor
from fusion_advisor.errors import WeightsApart
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.records import Status
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.workload.load import describe_live
from fusion_advisor.workload.weight_packing import lay_out_siblings
from tests.fuse.live.test_saved_plan import saved_run
from tests.fuse.test_pipeline import keep_all, pytestmark, quick, verdicts  # noqa: F401


class Gated(torch.nn.Module):
    """A gated MLP behind a norm: two linears of one input, and a chain that reads both."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.gate, self.up = torch.nn.Linear(64, 96, bias=False), torch.nn.Linear(64, 96, bias=False)
        self.down = torch.nn.Linear(96, 64)

    def forward(self, x):
        y = self.norm(x)
        return self.down(F.silu(self.gate(y)) * self.up(y)) + x


def gated(*, is_laid_out=True, seed=0):
    torch.manual_seed(seed)
    model = Gated().eval()
    if is_laid_out:
        assert lay_out_siblings(model) == 2
    return describe_live(model, (torch.randn(2, 48, 64),))


def planted(status=Status.KEPT):
    """Every rewrite is kept, merging as asked."""
    made = Verdict(id="R4", status=status, reason="planted", delta_ns=-5, interval_ns=(-6, -4))
    return verdicts(keep_all, on_top=lambda *_, **__: made)


def row_of(run):
    return next(row for row in run.report.rewrites if row.id == "merge-gemms")


def test_a_merge_that_pays_stays_with_its_chains(quick):  # noqa: F811
    loaded = gated()
    expected = loaded.model(*loaded.args)
    state = {name: (value.data_ptr(), value.clone()) for name, value in loaded.model.state_dict().items()}
    run = apply_workload(loaded, quick, instruments=planted())
    row = row_of(run)
    assert (row.status, row.sites, row.held_bytes) == (Status.KEPT, 1, 0)
    assert "no weight is copied" in row.reason
    assert run.report.rewrites[-1] == row
    assert run.report.model_check.is_passed
    swiglu = next(fusion for fusion in run.report.fusions if fusion.kernel == "swiglu")
    assert swiglu.receipt.sites_replaced == swiglu.receipt.launches_after == 1
    assert "merged" in swiglu.rendered[0].path
    assert (quick.run_dir / swiglu.rendered[0].path).is_file()
    gemms = sum(count for name, _, count, _ in run.report.after.kernels if name == "aten::linear")
    before = sum(count for name, _, count, _ in run.report.before.kernels if name == "aten::linear")
    assert (before, gemms) == (3, 2)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(*loaded.args), expected, rtol=1e-5, atol=1e-5)
    assert run.fused.fallbacks == {}
    run.revert()
    assert "_compiled_call_impl" not in loaded.model.__dict__
    assert torch.equal(loaded.model(*loaded.args), expected)
    for name, value in loaded.model.state_dict().items():
        assert value.data_ptr() == state[name][0]
        assert torch.equal(value, state[name][1])
    assert load_report(dump_report(run.report)) == run.report


def test_a_merge_that_does_not_pay_leaves_everything_as_it_was_decided(quick):  # noqa: F811
    run = apply_workload(gated(), quick, instruments=planted(Status.WITHIN_NOISE))
    assert row_of(run).status is Status.WITHIN_NOISE
    swiglu = next(fusion for fusion in run.report.fusions if fusion.kernel == "swiglu")
    assert swiglu.status is Status.KEPT
    assert "merged" not in swiglu.rendered[0].path
    gemms = sum(count for name, _, count, _ in run.report.after.kernels if name == "aten::linear")
    assert gemms == 3


def test_weights_that_lie_apart_are_named_with_their_bytes(quick):  # noqa: F811
    row = row_of(apply_workload(gated(is_laid_out=False), quick, instruments=planted()))
    assert (row.status, row.step_delta_ns, row.held_bytes) == (Status.NOT_REPLACED, None, 0)
    assert "49,152 bytes" in row.reason


def test_a_copy_that_was_allowed_is_held_and_said(quick):  # noqa: F811
    from dataclasses import replace

    run = apply_workload(gated(is_laid_out=False), replace(quick, freeze=True), instruments=planted())
    row = row_of(run)
    assert (row.status, row.held_bytes) == (Status.KEPT, 2 * 96 * 64 * 4)
    assert "49,152 bytes of copies stay in memory (--freeze)" in row.reason


def test_the_keep_rule_itself_decides(quick):  # noqa: F811
    row = row_of(apply_workload(gated(), quick, instruments=verdicts(keep_all)))
    assert row.status in (Status.KEPT, Status.WITHIN_NOISE, Status.SLOWER)
    assert row.step_delta_ci_ns[0] <= row.step_delta_ns <= row.step_delta_ci_ns[1]


def test_a_saved_plan_merges_again(quick):  # noqa: F811
    saved_run(gated(), quick, planted())
    plan = load_plan(quick.run_dir)
    assert plan.rewrites["merge-gemms"].sites == 1
    other = gated(seed=1)
    expected = other.model(*other.args)
    with torch.no_grad(), apply_plan(other, plan) as fused:
        torch.testing.assert_close(other.model(*other.args), expected, rtol=1e-5, atol=1e-5)
        assert fused.fallbacks == {}


def test_a_saved_plan_is_refused_where_the_weights_lie_apart(quick):  # noqa: F811
    saved_run(gated(), quick, planted())
    loaded, plan = gated(is_laid_out=False), load_plan(quick.run_dir)
    with pytest.raises(WeightsApart, match="has merged GEMMs, for which weights must lie together in memory"):
        apply_plan(loaded, plan)
    before = loaded.model._call_impl(*loaded.args)
    assert loaded.model.gate.weight.untyped_storage().nbytes() == loaded.model.gate.weight.nbytes
    assert fusion_advisor.lay_out_weights(loaded.model) == 2
    fused = fusion_advisor.apply(loaded.model, loaded.args, plan=plan)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(*loaded.args), before, rtol=1e-5, atol=1e-5)
    assert fused.fallbacks == {}
    fused.revert()


def test_a_copied_model_merges_its_own_weights(quick):  # noqa: F811
    loaded = gated()
    twin = copy.deepcopy(loaded.model)
    run = apply_workload(loaded, quick, instruments=planted())
    with torch.no_grad():
        twin.gate.weight.zero_()
        expected = loaded.model._call_impl(*loaded.args)
        torch.testing.assert_close(loaded.model(*loaded.args), expected, rtol=1e-5, atol=1e-5)
    run.revert()


@pytest.mark.gpu
def test_a_merged_step_on_a_gpu_gives_the_models_numbers(tmp_path):
    from fusion_advisor.fuse.plan.options import ApplyOptions

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Gated() for _ in range(4))).eval().to("cuda", torch.bfloat16)
    assert lay_out_siblings(model) == 16
    instruments = Instruments(on_top=planted().on_top)
    loaded = describe_live(model, (torch.randn(2, 48, 64, device="cuda", dtype=torch.bfloat16),))
    run = apply_workload(loaded, ApplyOptions(runs=10, min_share=0.0, run_dir=tmp_path, compile=False), instruments=instruments)
    assert (row_of(run).sites, row_of(run).held_bytes) == (4, 0)
    assert run.report.model_check.is_passed
    assert run.report.step_after.method == "cuda_graph"
