"""The stage that leaves out rows which nobody reads, in the whole loop on a CPU: its row, its kernels, its plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from fusion_advisor.errors import PlanMismatch
from fusion_advisor.fuse.decide.rebind import CannotMove
from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.passes import slice_pushdown
from fusion_advisor.fuse.passes.merge_gemms import MERGE_GEMMS
from fusion_advisor.fuse.passes.slice_pushdown import NARROW_ROWS
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.stages import try_layout_change
from fusion_advisor.records import Status
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.workload.load import describe_live
from fusion_advisor.workload.weight_packing import lay_out_siblings
from tests.fuse import test_pipeline
from tests.fuse.live.test_saved_plan import saved_run
from tests.fuse.test_pipeline import keep_all, verdicts
from tests.tiny import qwen2

quick, pytestmark = test_pipeline.quick, test_pipeline.pytestmark


class Layer(torch.nn.Module):
    """A gated MLP between norms."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.gate, self.up = torch.nn.Linear(64, 96, bias=False), torch.nn.Linear(64, 96, bias=False)
        self.down = torch.nn.Linear(96, 64)

    def forward(self, x):
        y = self.norm(x)
        return self.down(functional.silu(self.gate(y)) * self.up(y)) + x


class Classifier(torch.nn.Module):
    """Two layers, a mixing of tokens, and a class of the first token."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.classes = Layer(), Layer(), torch.nn.Linear(64, 5)

    def forward(self, x):
        x = self.first(x)
        return self.classes(self.second(x + x.cumsum(1))[:, 0])


def classifier(*, seed=0, device="cpu", dtype=torch.float32):
    torch.manual_seed(seed)
    model = Classifier().eval().to(device, dtype)
    lay_out_siblings(model)
    return describe_live(model, (torch.randn(2, 48, 64, device=device, dtype=dtype),))


def planted(**statuses):
    """Every rewrite is kept, with those on top of the others as asked."""

    def verdict(_runner, before, after, *, name, **_):
        before(), after()
        return Verdict(id=name, status=statuses.get(name, Status.KEPT), reason="planted", delta_ns=-5, interval_ns=(-6, -4))

    return verdicts(keep_all, on_top=verdict)


def row_of(run):
    return next(row for row in run.report.rewrites if row.id == NARROW_ROWS.id)


def test_rows_that_nobody_reads_go_with_their_kernels(quick):
    loaded = classifier()
    expected = loaded.model(*loaded.args)
    run = apply_workload(loaded, quick, instruments=planted())
    row = row_of(run)
    assert (row.id, row.status, row.held_bytes) == ("narrow-rows", Status.KEPT, 0) and row.sites > 5
    assert [one.id for one in run.report.rewrites][-2:] == [NARROW_ROWS.id, MERGE_GEMMS.id]
    swiglu = next(fusion for fusion in run.report.fusions if fusion.kernel == "swiglu")
    assert swiglu.receipt.sites_replaced == swiglu.receipt.launches_after == 2
    assert run.report.model_check.is_passed
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(*loaded.args), expected, rtol=1e-5, atol=1e-5)
        other = torch.randn(3, 9, 64)
        with pytest.warns(UserWarning, match="not verified"):
            torch.testing.assert_close(loaded.model(other), loaded.model._call_impl(other), rtol=1e-5, atol=1e-5)
    run.revert()
    assert torch.equal(loaded.model(*loaded.args), expected)
    assert load_report(dump_report(run.report)) == run.report


@pytest.mark.slow
@pytest.mark.parametrize("merges", [Status.KEPT, Status.SLOWER])
def test_a_saved_plan_leaves_the_same_rows_out(quick, merges):
    saved_run(classifier(), quick, planted(**{MERGE_GEMMS.id: merges}))
    plan = load_plan(quick.run_dir)
    assert (NARROW_ROWS.id in plan.rewrites, MERGE_GEMMS.id in plan.rewrites) == (True, merges is Status.KEPT)
    other = classifier(seed=1)
    expected = other.model(*other.args)
    with torch.no_grad(), apply_plan(other, plan) as fused:
        torch.testing.assert_close(other.model(*other.args), expected, rtol=1e-5, atol=1e-5)
        assert fused.fallbacks == {}
    rows = [replace(row, sites=row.sites + 1) if row.id == NARROW_ROWS.id else row for row in plan.report.rewrites]
    plan = replace(plan, report=replace(plan.report, rewrites=tuple(rows)))
    with pytest.raises(PlanMismatch, match="narrowed rows are not to be had here"):
        apply_plan(classifier(), plan)


def test_rows_that_do_not_pay_stay(quick):
    run = apply_workload(classifier(), quick, instruments=planted(**{NARROW_ROWS.id: Status.WITHIN_NOISE}))
    assert row_of(run).status is Status.WITHIN_NOISE
    assert run.report.model_check.is_passed
    swiglu = next(fusion for fusion in run.report.fusions if fusion.kernel == "swiglu")
    assert not any("rows" in kernel.path for kernel in swiglu.rendered)


def test_a_kernel_that_holds_what_cannot_be_narrowed_is_said(quick, monkeypatch):
    def refuse(*_):
        raise CannotMove("F1 on the new layout: no")

    monkeypatch.setattr(try_layout_change, "on_changed", refuse)
    row = row_of(apply_workload(classifier(), quick, instruments=planted()))
    assert (row.status, row.reason, row.step_delta_ns) == (Status.NOT_REPLACED, "F1 on the new layout: no", None)


def test_a_view_that_cannot_be_had_is_said(quick, monkeypatch):
    def refuse(*_):
        raise RuntimeError("view size is not compatible\nwith its stride")

    monkeypatch.setattr(slice_pushdown, "_narrow", refuse)
    row = row_of(apply_workload(classifier(), quick, instruments=planted()))
    assert (row.status, row.reason, row.sites) == (Status.NOT_REPLACED, "view size is not compatible", 1)


def test_a_model_that_reads_all_rows_has_no_such_row(quick):
    loaded = describe_live(Layer().eval(), (torch.randn(2, 48, 64),))
    assert not any(row.id == NARROW_ROWS.id for row in apply_workload(loaded, quick, instruments=planted()).report.rewrites)


@pytest.mark.slow
def test_queries_that_are_rotated_with_keys_are_computed_in_full(quick):
    """A prefill that asks for its last token's logits: one kernel rotates queries and keys, which all tokens need."""
    model, inputs = qwen2()
    lay_out_siblings(model)
    loaded = describe_live(model, (), {**inputs, "logits_to_keep": 1})
    expected = model(*loaded.args, **loaded.kwargs).logits
    run = apply_workload(loaded, replace(quick, only=("rope_qk", "swiglu")), instruments=planted())
    row = row_of(run)
    assert row.status is Status.KEPT and row.sites > 5
    rope, swiglu = (next(one for one in run.report.fusions if one.kernel == name) for name in ("rope_qk", "swiglu"))
    assert rope.receipt.sites_replaced == swiglu.receipt.sites_replaced == 2
    with torch.no_grad():
        torch.testing.assert_close(model(*loaded.args, **loaded.kwargs).logits, expected, rtol=1e-5, atol=1e-5)
    assert run.fused.fallbacks == {}


@pytest.mark.gpu
@pytest.mark.serial  # a step that other processes on the GPU make slower is reverted
def test_on_a_gpu_a_classifier_computes_one_token_of_its_last_layer(tmp_path):
    import fusion_advisor as fa

    loaded = classifier(device="cuda", dtype=torch.bfloat16)
    report = fa.apply(loaded.model, (torch.randn(64, 256, 64, device="cuda", dtype=torch.bfloat16),), compile=False).report
    row = next(row for row in report.rewrites if row.id == NARROW_ROWS.id)
    assert row.status in (Status.KEPT, Status.WITHIN_NOISE) and row.sites > 5
    assert report.model_check.is_passed
