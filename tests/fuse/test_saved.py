"""What a run kept, read back and put into another instance of the same model; anything else is refused."""

from __future__ import annotations

import gzip

import pytest
import torch

import fusion_advisor
from fusion_advisor.errors import PlanMismatch, UnreadableReport
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.saved import apply_plan, first_difference, load_plan
from fusion_advisor.records import Status
from fusion_advisor.serialize import dump_capture, dump_report
from fusion_advisor.workload.load import describe_live
from tests.fuse.test_pipeline import Model, keep_all, keep_none, loaded, pytestmark, quick, verdicts  # noqa: F401
from tests.tiny import profiled


def saved_run(loaded, quick):  # noqa: F811
    run = apply_workload(loaded, quick)
    run.revert()
    save(run, quick.run_dir)
    return run


def save(run, folder):
    folder.mkdir(exist_ok=True)
    (folder / "capture.json.gz").write_bytes(gzip.compress(dump_capture(run.capture).encode()))
    (folder / "report.json").write_text(dump_report(run.report))


def another(seed=1, length=48):
    torch.manual_seed(seed)
    return describe_live(Model().eval(), (torch.randn(2, length, 64),))


def test_a_kept_plan_is_applied_to_another_instance(loaded, quick, monkeypatch):  # noqa: F811
    verdicts(monkeypatch, keep_all)
    run = saved_run(loaded, quick)
    plan = fusion_advisor.load_plan(quick.run_dir)
    kept = [fusion for fusion in run.report.fusions if fusion.status is Status.KEPT]
    assert [fusion.chain.id for fusion in plan.fusions] == [fusion.chain_id for fusion in kept]
    assert len(plan.passes) == sum(rewrite.status is Status.KEPT for rewrite in run.report.rewrites)
    other = another()
    expected = other.model(*other.args)
    with torch.no_grad(), apply_plan(other, plan) as fused:
        torch.testing.assert_close(other.model(*other.args), expected, rtol=1e-5, atol=1e-5)
        assert fused.fallbacks == {}
    assert "_compiled_call_impl" not in other.model.__dict__
    assert "_compiled_call_impl" not in loaded.model.__dict__


def test_what_was_not_kept_is_not_in_the_plan(loaded, quick, monkeypatch):  # noqa: F811
    verdicts(monkeypatch, keep_none)
    saved_run(loaded, quick)
    plan = load_plan(quick.run_dir)
    assert plan.fusions == plan.passes == ()


def test_another_shape_or_model_is_refused(loaded, quick, monkeypatch):  # noqa: F811
    verdicts(monkeypatch, keep_all)
    saved_run(loaded, quick)
    plan = load_plan(quick.run_dir)
    for other in (another(length=32), describe_live(torch.nn.Linear(64, 64), (torch.randn(2, 48, 64),))):
        with pytest.raises(PlanMismatch):
            apply_plan(other, plan)
        assert "_compiled_call_impl" not in other.model.__dict__


def test_a_run_without_its_files_is_refused(tmp_path):
    with pytest.raises(UnreadableReport):
        load_plan(tmp_path)


def test_the_first_difference_is_named():
    gpt2, qwen2 = profiled("gpt2")[1].ops, profiled("qwen2")[1].ops
    assert first_difference(gpt2, list(gpt2)) is None
    index, text = first_difference(gpt2, list(qwen2))
    assert text.startswith(f"op {index} ") and "the plan has" in text
    assert first_difference(gpt2, list(gpt2[:-1]))[1] == f"this graph has {len(gpt2) - 1} ops, the plan's has {len(gpt2)}"
