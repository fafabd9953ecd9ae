"""Kernels of unrolled recurrences in the whole loop: checked, kept or dropped, saved and restored."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.capture.loops.one_op import fold_loops
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.stages import scan_kernels
from fusion_advisor.fuse.stages.gemm_sites import observe
from fusion_advisor.records import Status
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.workload.load import describe_live
from tests.fuse import test_pipeline
from tests.fuse.live.test_saved_plan import save
from tests.kernel_cases import recurrences
from tools.zoo.plain import SelectiveScan

pytestmark, quick = test_pipeline.pytestmark, test_pipeline.quick
STEPS, LAYERS = 50, 2


def workload(model=None, steps=STEPS):
    torch.manual_seed(0)
    model = model or SelectiveScan(width=8, states=4, layers=LAYERS, steps=steps).eval()
    return describe_live(model, (torch.randn(2, steps, 8),), {})


def planted(status):
    def on_top(*_, name, **__):
        return Verdict(id=name, status=status, reason="planted", delta_ns=-5, interval_ns=(-6, -4))

    return test_pipeline.verdicts(test_pipeline.keep_all, on_top=on_top)


def row_of(run):
    (row,) = [fusion for fusion in run.report.fusions if not fusion.chain_id]
    return row


def test_the_whole_loop_and_its_saved_plan(quick):
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


def test_one_that_does_not_pay_is_dropped(quick):
    loaded = workload()
    run = apply_workload(loaded, replace(quick, only=("recurrence",)), instruments=planted(Status.SLOWER))
    assert row_of(run).status is Status.SLOWER and row_of(run).receipt.sites_replaced == 0
    with torch.no_grad():
        assert torch.equal(run.fused(*loaded.args), loaded.model(*loaded.args))


def test_a_kernel_with_wrong_numbers_does_not_pass(tmp_path):
    loaded = workload()
    with torch.no_grad():
        live = capture_regions(loaded.model, loaded.args, {})
    fold_loops(live)
    bench = Bench(live, on_cuda=False)
    (kind,), left = scan_kernels.find_kinds(bench)
    assert left == [] and len(kind.places) == LAYERS
    observe(bench, kind.places)
    made = scan_kernels.build(kind, torch.device("cpu"), tmp_path / "kernel")
    assert scan_kernels.check(bench, kind, made, seed=1).is_passed

    def spoilt(*tensors):
        made.launch(*tensors)
        tensors[-1][0, -1] *= 1.01  # the last step of one batch

    assert not scan_kernels.check(bench, kind, replace(made, launch=spoilt), seed=1).is_passed


class Gated(torch.nn.Module):
    """A recurrence that hands out its last state."""

    def forward(self, x, gates, start):
        return recurrences.gated(x, gates, start)


def test_the_last_state_is_handed_out(tmp_path):
    inputs = tuple(recurrences.normal(*shape) for shape in ((STEPS, 2, 5), (STEPS, 2, 5), (2, 5)))
    with torch.no_grad():
        live = capture_regions(Gated(), inputs, {})
    fold_loops(live)
    bench = Bench(live, on_cuda=False)
    (kind,), _ = scan_kernels.find_kinds(bench)
    observe(bench, kind.places)
    made = scan_kernels.build(kind, torch.device("cpu"), tmp_path / "kernel")
    assert scan_kernels.check(bench, kind, made, seed=1).is_passed
    built = scan_kernels.install(bench, kind, made, name="S1")
    assert len(built.sites[0].outputs) == 2
    found, expected = bench.run(bench.build((), (), [built])), Gated()(*inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("skip", ["recurrence", "scan-kernels"])
def test_skip_names_them(quick, skip):
    run = apply_workload(workload(), replace(quick, only=(), skip=(skip, "*")), instruments=planted(Status.KEPT))
    assert not [fusion for fusion in run.report.fusions if fusion.kernel == "recurrence"]
