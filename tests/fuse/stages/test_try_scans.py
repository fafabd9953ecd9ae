"""Kernels of unrolled recurrences in the whole loop: checked, kept or dropped, saved and restored."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.stages import scan_kernels
from fusion_advisor.records import Status
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.workload.load import describe_live
from tests.fuse.live.test_saved_plan import save
from tests.fuse.test_pipeline import keep_all, pytestmark, quick, verdicts  # noqa: F401
from tools.zoo.plain import SelectiveScan

STEPS, LAYERS = 50, 2


def workload(model=None, steps=STEPS):
    torch.manual_seed(0)
    model = model or SelectiveScan(width=8, states=4, layers=LAYERS, steps=steps).eval()
    return describe_live(model, (torch.randn(2, steps, 8),), {})


def planted(status):
    def on_top(*_, name, **__):
        return Verdict(id=name, status=status, reason="planted", delta_ns=-5, interval_ns=(-6, -4))

    return verdicts(keep_all, on_top=on_top)


def row_of(run):
    (row,) = [fusion for fusion in run.report.fusions if not fusion.chain_id]
    return row


def test_the_whole_loop_and_its_saved_plan(quick):  # noqa: F811
    loaded = workload()
    twin = copy.deepcopy(loaded.model)
    run = apply_workload(loaded, replace(quick, only=("recurrence",)), instruments=planted(Status.KEPT))
    row = row_of(run)
    assert (row.id, row.kernel, row.status) == ("S1", "recurrence", Status.KEPT)
    assert row.receipt.sites_replaced == row.receipt.sites_found == LAYERS
    assert row.numerics.is_passed and row.chain_before and row.chain_after and row.kernel_bytes
    assert "would read and write it 50 times" in " ".join(row.rendered[0].source.replace("//", "").split())
    assert run.report.model_check.is_passed and load_report(dump_report(run.report)) == run.report
    (x,) = loaded.args
    with torch.no_grad():
        eager, fused, exact = twin(x), run.fused(x), copy.deepcopy(twin).double()(x.double())
    ours, theirs = (((value.double() - exact).norm() / exact.norm()).item() for value in (fused, eager))
    assert 0 < ours <= 1.5 * theirs and run.fused.fallbacks == {}
    run.revert()

    save(run, quick.run_dir)
    plan = load_plan(quick.run_dir)
    assert [one.id for one in plan.scans] == ["S1"] and plan.linears == ()
    with torch.no_grad(), apply_plan(loaded, plan) as model:
        torch.testing.assert_close(loaded.model(x), eager, rtol=1e-4, atol=1e-5)
        assert model.fallbacks == {}


def test_one_that_does_not_pay_is_dropped(quick):  # noqa: F811
    loaded = workload()
    run = apply_workload(loaded, replace(quick, only=("recurrence",)), instruments=planted(Status.SLOWER))
    assert row_of(run).status is Status.SLOWER and row_of(run).receipt.sites_replaced == 0
    with torch.no_grad():
        assert torch.equal(run.fused(*loaded.args), loaded.model(*loaded.args))


def test_a_kernel_with_wrong_numbers_is_dropped(quick, monkeypatch):  # noqa: F811
    own = scan_kernels.launcher_of

    def spoilt(site, launch):
        right = own(site, launch)

        def call(*tensors):
            right(*tensors)
            tensors[-1].mul_(1.01)

        return call

    monkeypatch.setattr(scan_kernels, "launcher_of", spoilt)
    run = apply_workload(workload(), replace(quick, only=("recurrence",)), instruments=planted(Status.KEPT))
    assert row_of(run).status is Status.WRONG_NUMBERS


@pytest.mark.parametrize("skip", ["recurrence", "scan-kernels"])
def test_skip_names_them(quick, skip):  # noqa: F811
    run = apply_workload(workload(), replace(quick, only=(), skip=(skip, "*")), instruments=planted(Status.KEPT))
    assert not [fusion for fusion in run.report.fusions if fusion.kernel == "recurrence"]
