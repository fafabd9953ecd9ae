"""The library's own three functions, as a user calls them."""

from __future__ import annotations

import re
import shutil
from collections import UserDict

import pytest
import torch

import fusion_advisor
from fusion_advisor.errors import AutocastAround, CannotCapture, ModelInTraining, PlanMismatch
from fusion_advisor.fuse.plan.options import Budgets
from fusion_advisor.records import Status
from tests.tiny import BANDWIDTH, Toy, toy


@pytest.fixture(autouse=True)
def _quick(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


QUICK = {"warmup": 1, "runs": 5, "bandwidth": BANDWIDTH, "budgets": Budgets(wall_s=0.02, decide_s=0.1)}


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"x": x}, lambda x: UserDict(x=x)])
def test_inputs_come_as_a_tensor_a_sequence_or_a_mapping(wrap):
    model, (x,) = toy()
    report = fusion_advisor.profile(model, wrap(x), **QUICK)
    assert report.status == "profiled"
    assert [meta.shape for _, meta in report.workload.inputs] == [(6, 32)]


def test_torchs_own_modules_can_be_profiled():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Softmax(-1)).eval()
    assert fusion_advisor.profile(model, torch.randn(4, 8), **QUICK).captured.launches >= 3


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_apply_gives_a_model_that_is_used_like_the_model(tmp_path):
    model, (x,) = toy()
    expected = model(x)
    with torch.no_grad(), fusion_advisor.apply(model, x, run_dir=tmp_path / "run", **QUICK) as fused:
        torch.testing.assert_close(fused(x), expected)
        torch.testing.assert_close(model(x), expected)
        assert fused.report.status == "applied"
        assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", fused.report.run_id) and fused.report.environment.tool
    names = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    kernels = {kernel.path for fusion in fused.report.fusions for kernel in fusion.rendered if kernel.path}
    assert kernels and names >= {"report.json", "report.html", "report.md", "capture.json.gz", *kernels}
    assert f"Run <code>{fused.report.run_id}</code>" in (tmp_path / "run/report.html").read_text()
    assert (
        fusion_advisor.load_report(tmp_path / "run") == fusion_advisor.load_report(tmp_path / "run/report.json") == fused.report
    )
    assert "_compiled_call_impl" not in model.__dict__


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_without_a_run_directory_nothing_is_written(tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    model, (x,) = toy()
    report = fusion_advisor.apply(model, x, **QUICK).report
    assert report.fusions and report.fusions[0].rendered
    assert list(empty.iterdir()) == []


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="wrap a function in a module"):
        fusion_advisor.apply(torch.tanh, torch.randn(3))
    with pytest.raises(TypeError, match=r"the name 'gpt2': load it first.*from_pretrained\('gpt2'\)"):
        fusion_advisor.lay_out_weights("gpt2")
    with pytest.raises(TypeError, match=r"the class Toy: make one of it, Toy\(...\)"):
        fusion_advisor.apply(Toy, torch.randn(3))
    with pytest.raises(TypeError, match=r"plan=fa.load_plan\('runs/mine'\)"):
        fusion_advisor.apply(Toy().eval(), torch.randn(2, 32), plan="runs/mine")
    scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()).eval())
    with pytest.raises(CannotCapture, match="TorchScript"):
        fusion_advisor.apply(scripted, torch.randn(2, 3))


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="no_such"):
        fusion_advisor.profile(Toy(), torch.randn(2, 32), no_such=1)


def test_a_saved_plan_is_put_in_again_checked_and_not_timed(tmp_path):
    model, inputs = wide_mlp()
    with fusion_advisor.apply(model, inputs, run_dir=tmp_path, keep="verified", **QUICK) as first:
        kept = [fusion.kernel for fusion in first.report.fusions if fusion.status is Status.KEPT]
        with torch.no_grad():
            expected = first(inputs)
    assert kept
    plan = fusion_advisor.load_plan(tmp_path)
    assert [fusion.match.kernel for fusion in plan.fusions] == kept
    with fusion_advisor.apply(model, inputs, plan=plan) as again, torch.no_grad():
        assert torch.equal(again(inputs), expected)
        assert not again.fallbacks
    with pytest.raises(PlanMismatch, match="does not fit"):
        fusion_advisor.apply(model, inputs[:1], plan=plan)


def wide_mlp():
    class Mlp(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow = torch.nn.Linear(16, 2048)

        def forward(self, x):
            h = self.narrow(x)
            return 0.5 * h * (1.0 + torch.tanh(0.7978845608 * (h + 0.044715 * torch.pow(h, 3.0))))

    torch.manual_seed(0)
    return Mlp().eval(), torch.randn(4, 256, 16)


def test_a_transformers_model_is_profiled_with_its_cache_on_as_by_default():
    from tests.tiny import qwen2

    model, inputs = qwen2()
    assert fusion_advisor.profile(model, {"input_ids": inputs["input_ids"]}, **QUICK).status == "profiled"


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_a_second_apply_takes_the_place_of_the_first_and_measures_the_models_own_ops():
    model, (x,) = toy()
    first = fusion_advisor.apply(model, x, keep="verified", **QUICK)
    before = first.report.before.launches
    assert first.is_applied and first.report.after.launches < before
    assert fusion_advisor.profile(model, x, **QUICK).before.launches == before
    assert first.is_applied  # profiling changes nothing
    second = fusion_advisor.apply(model, x, keep="verified", **QUICK)
    assert (first.is_applied, second.is_applied, second.report.before.launches) == (False, True, before)
    first.apply()
    assert (first.is_applied, second.is_applied) == (True, False)
    second.revert()
    assert first.is_applied
    first.revert()
    assert "_compiled_call_impl" not in model.__dict__


def test_a_model_in_train_mode_is_not_fused_in_vain():
    model, (x,) = toy()
    with pytest.raises(ModelInTraining, match=r"`Toy` is in train\(\) mode"):
        fusion_advisor.apply(model.train(), x, **QUICK)
    dropout = torch.nn.Sequential(model.eval(), torch.nn.Dropout(0.1)).eval()
    dropout[1].train()
    with pytest.raises(ModelInTraining):
        fusion_advisor.apply(dropout, x, **QUICK)
    assert fusion_advisor.profile(model.train(), x, **QUICK).status == "profiled"


def test_a_model_under_autocast_is_not_fused_in_vain():
    model, (x,) = toy()
    model.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(AutocastAround, match="autocast is on around this call of apply"):
            fusion_advisor.apply(model, x, **QUICK)
        assert "_compiled_call_impl" not in model.__dict__
        assert fusion_advisor.profile(model, x, **QUICK).status == "profiled"


def test_options_beside_a_plan_are_refused(tmp_path):
    model, (x,) = toy()
    with pytest.raises(TypeError, match="without min_gain, run_dir"):
        fusion_advisor.apply(model, x, plan=object(), run_dir=tmp_path, min_gain=0.1)


def test_an_exported_module_which_has_no_eval_gets_a_hint_of_its_own():
    model, (x,) = toy()
    exported = torch.export.export(model, (x,)).module()
    with pytest.raises(ModelInTraining) as refused:
        fusion_advisor.apply(exported, x, **QUICK)
    assert refused.value.hint_text.startswith("set model.training = False")
    with pytest.raises(ModelInTraining) as refused:
        fusion_advisor.apply(model.train(), x, **QUICK)
    assert refused.value.hint_text.startswith("call model.eval()")


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_a_model_that_dynamo_captures_otherwise_is_reverted_and_the_reason_says_so():
    """Padded places are 0 on the fast path of torch's layers, and numbers on the way that dynamo takes."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu")
    model = torch.nn.TransformerEncoder(layer, 1).eval()
    call = {"src": torch.randn(2, 5, 16), "src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])}
    with torch.no_grad():
        before = model(**call)
        fused = fusion_advisor.apply(model, call, keep="verified", **QUICK)
        assert torch.equal(model(**call), before)
    reasons = [fusion.reason for fusion in fused.report.fusions]
    assert reasons and all("dynamo's capture computes other numbers than the model" in reason for reason in reasons)
