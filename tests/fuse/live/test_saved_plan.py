"""What a run kept, read back and put into another instance of the same model; anything else is refused."""

from __future__ import annotations

import gzip
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fusion_advisor
from fusion_advisor.codegen.cpp.backend import _FAST_FLAGS, CppKernel, find_compiler
from fusion_advisor.errors import AutocastAround, ModelInTraining, NoPlan, PlanMismatch, UnreadableReport, WeightsApart
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.graph_difference import first_difference
from fusion_advisor.fuse.live.restore_plan import apply_plan, require_room
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.library.discover import scaffold
from fusion_advisor.records import OpClass, OpNode, Status, Tolerance
from fusion_advisor.records.serialize import dump_capture, dump_report
from fusion_advisor.workload.load import describe_live
from tests.fuse.test_pipeline import Model, keep_all, keep_none, loaded, pytestmark, quick, verdicts  # noqa: F401
from tests.tiny import profiled


def saved_run(loaded, quick, instruments):  # noqa: F811
    run = apply_workload(loaded, quick, instruments=instruments)
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


def test_a_kept_plan_is_applied_to_another_instance(loaded, quick):  # noqa: F811
    run = saved_run(loaded, quick, verdicts(keep_all))
    plan = fusion_advisor.load_plan(quick.run_dir)
    kept = [fusion for fusion in run.report.fusions if fusion.status is Status.KEPT]
    assert [fusion.chain.id for fusion in plan.fusions] == [fusion.chain_id for fusion in kept]
    assert len(plan.rewrites) == sum(rewrite.status is Status.KEPT for rewrite in run.report.rewrites)
    other = another()
    expected = other.model(*other.args)
    with torch.no_grad(), apply_plan(other, plan) as fused:
        torch.testing.assert_close(other.model(*other.args), expected, rtol=1e-5, atol=1e-5)
        assert fused.fallbacks == {}
    assert "_compiled_call_impl" not in other.model.__dict__
    assert "_compiled_call_impl" not in loaded.model.__dict__


def test_the_users_limit_is_the_plans(loaded, quick):  # noqa: F811
    saved_run(loaded, replace(quick, rtol=1e-3, atol=1e-3), verdicts(keep_all))
    plan = load_plan(quick.run_dir)
    assert plan.report.tolerance == Tolerance(rtol=1e-3, atol=1e-3)
    with torch.no_grad(), apply_plan(another(), plan) as fused:
        fused.specialize(torch.randn(2, 32, 64))
    stricter = replace(plan, report=replace(plan.report, tolerance=Tolerance(rtol=0.0, atol=0.0)))
    with pytest.raises(PlanMismatch, match="its numbers no longer pass"):
        apply_plan(another(), stricter)


def test_what_was_not_kept_is_not_in_the_plan(loaded, quick):  # noqa: F811
    saved_run(loaded, quick, verdicts(keep_none))
    plan = load_plan(quick.run_dir)
    assert plan.fusions == () and not plan.rewrites


def test_a_plan_is_not_put_in_where_each_call_would_run_the_original_ops(request):
    model, options = (request.getfixturevalue(name) for name in ("loaded", "quick"))
    saved_run(model, options, verdicts(keep_all))
    plan, other = load_plan(options.run_dir), another()
    other.model.train()
    with pytest.raises(ModelInTraining):
        apply_plan(other, plan)
    other.model.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(AutocastAround):
        apply_plan(other, plan)
    assert "_compiled_call_impl" not in other.model.__dict__


class Squashed(torch.nn.Module):
    """Linear, then what the kernel that `kernels new` makes computes."""

    def __init__(self):
        super().__init__()
        self.linear, self.weight = torch.nn.Linear(64, 64), torch.nn.Parameter(torch.rand(64))

    def forward(self, x):
        wide = self.linear(x).float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return torch.sigmoid(wide * scale * self.weight.float()).to(x.dtype)


def squashed():
    torch.manual_seed(0)
    return describe_live(Squashed().eval(), (torch.randn(2, 48, 64),))


def test_kernels_of_a_users_directory_and_fast_math_are_the_plans(quick, tmp_path):  # noqa: F811
    mine = tmp_path / "mine"
    scaffold("my_squash", mine)
    run = saved_run(squashed(), replace(quick, kernel_dirs=(mine,), fast_math=True), verdicts(keep_all))
    kept = {fusion.kernel: fusion.rendered[0] for fusion in run.report.fusions if fusion.status is Status.KEPT}
    assert "my_squash" in kept and all(kernel.fast_math for kernel in kept.values())
    shutil.rmtree(mine)  # what a kernel is named after is in the plan
    shutil.rmtree(quick.run_dir / "kernels")
    other = squashed()
    expected = other.model(*other.args)
    with torch.no_grad(), apply_plan(other, load_plan(quick.run_dir)) as fused:
        torch.testing.assert_close(other.model(*other.args), expected, rtol=1e-5, atol=1e-5)
        assert fused.fallbacks == {}
        fused.specialize(torch.randn(2, 32, 64))
    built = {f"kernels/{path.name}": path.read_text() for path in (quick.run_dir / "kernels").glob("*.cpp")}
    assert built == {kernel.path: kernel.source for kernel in kept.values()}
    assert all("ffast" in source or "Fast math" in source for source in built.values())


def test_a_plan_without_fast_math_is_put_in_place_without(quick, monkeypatch, tmp_path):  # noqa: F811
    run = saved_run(squashed(), quick, verdicts(keep_all))
    assert not any(kernel.fast_math for fusion in run.report.fusions for kernel in fusion.rendered)
    compiled = tmp_path / "compiled.txt"
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {compiled}\nexec {find_compiler()[0]} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another cache"))  # so that the compiler is asked again
    apply_plan(squashed(), load_plan(quick.run_dir)).revert()
    built = [line for line in compiled.read_text().splitlines() if ".cpp" in line]
    assert built and not any(flag in line for line in built for flag in _FAST_FLAGS)


def test_a_kernel_is_checked_again(loaded, quick, monkeypatch):  # noqa: F811
    saved_run(loaded, quick, verdicts(keep_all))
    plan = load_plan(quick.run_dir)
    real = CppKernel.bind

    def spoiled(self, program):
        launch = real(self, program)
        return lambda *tensors: (launch(*tensors), tensors[-1].mul_(1.01))

    monkeypatch.setattr(CppKernel, "bind", spoiled)
    with pytest.raises(PlanMismatch, match=r"F\d .*: its numbers no longer pass: relative error"):
        apply_plan(another(), plan)


def test_a_plan_that_fits_a_part_of_the_model_is_refused_with_the_site_and_the_way_out(loaded, quick):  # noqa: F811
    saved_run(loaded, quick, verdicts(keep_all))
    plan = load_plan(quick.run_dir)
    other = another()
    other.model.norm.eps = 1e-3  # another constant in the last chain; all before it fits
    with pytest.raises(PlanMismatch) as refused:
        apply_plan(other, plan)
    text = str(refused.value)
    assert "add_layernorm, site 1 of 1 (norm)" in text and "0.001" in text and "(norm at tests/fuse/test_pipeline.py:" in text
    assert "apply` again for this model" in PlanMismatch.hint
    assert "_compiled_call_impl" not in other.model.__dict__


def test_a_site_that_was_replaced_in_the_run_and_cannot_be_now_is_named(loaded, quick, monkeypatch):  # noqa: F811
    saved_run(loaded, quick, verdicts(keep_all))
    plan = load_plan(quick.run_dir)
    real = Bench.observe

    def surprised(bench, fusions, **also):
        real(bench, fusions, **also)
        bench.surprises[fusions[0].sites[0].inputs[0]] = "aten.linear returned strides (1, 2), traced (2, 1)"

    monkeypatch.setattr(Bench, "observe", surprised)
    with pytest.raises(PlanMismatch, match=r"F\d \w+ has no place at \w*: aten.linear returned strides"):
        apply_plan(another(), plan)


def test_another_shape_or_model_is_refused(loaded, quick):  # noqa: F811
    saved_run(loaded, quick, verdicts(keep_all))
    plan = load_plan(quick.run_dir)
    for other in (another(length=32), describe_live(torch.nn.Linear(64, 64).eval(), (torch.randn(2, 48, 64),))):
        with pytest.raises(PlanMismatch):
            apply_plan(other, plan)
        assert "_compiled_call_impl" not in other.model.__dict__


def test_a_run_without_its_files_is_refused(tmp_path):
    with pytest.raises(NoPlan, match=r"no saved plan in .*no capture\.json\.gz"):
        load_plan(tmp_path)
    (tmp_path / "capture.json.gz").touch()
    with pytest.raises(UnreadableReport):
        load_plan(tmp_path)


def test_the_first_difference_is_named():
    gpt2, qwen2 = profiled("gpt2")[1].ops, profiled("qwen2")[1].ops
    assert first_difference(gpt2, list(gpt2)) is None
    index, text = first_difference(gpt2, list(qwen2))
    assert text.startswith(f"op {index} ") and "the plan has" in text
    assert first_difference(gpt2, list(gpt2[:-1]))[1] == f"this graph has {len(gpt2) - 1} ops, the plan's has {len(gpt2)}"


def test_a_plan_whose_products_had_room_after_their_weights_refuses_a_model_without(tmp_path):
    rows = {name: SimpleNamespace(sites=2) for name in ("pad-gemm", "odd-width-gemm")}
    saved = SimpleNamespace(rewrites=rows, run_dir=tmp_path / "run")
    live = SimpleNamespace(model=torch.nn.Sequential(torch.nn.Linear(16, 13, dtype=torch.bfloat16)))
    fewer, all_of_them = (SimpleNamespace(changed={"pad-gemm": 2, "odd-width-gemm": count}) for count in (1, 2))
    require_room(live, saved, all_of_them)
    with pytest.raises(WeightsApart, match="run `run` has odd-width GEMMs"):
        require_room(live, saved, fewer)
    assert fusion_advisor.lay_out_weights(live.model) == 2
    require_room(live, saved, fewer)  # something else differs, and the ops have their own checks


def test_a_mask_of_nan_is_the_same_mask():
    masks = [
        OpNode(index=0, region=0, target="aten.masked_fill.Scalar", op_class=OpClass.POINTWISE, args=(float(fill),))
        for fill in ("nan", "nan", "inf")
    ]
    assert first_difference((masks[0],), [masks[1]]) is None
    assert first_difference((masks[0],), [masks[2]]) is not None
