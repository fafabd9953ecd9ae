"""What makes a saved plan quick to put in place: no second trace, no search for chains, only the kernels that were kept."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import torch

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.plan.plan import make_plan, recall
from fusion_advisor.ir.program import layout_key
from fusion_advisor.records import Match
from fusion_advisor.records.serialize import decode, encode
from fusion_advisor.runtime.torch_internals import dynamo
from tests.tiny import Toy, patterns, planned, profiled


def captured(x):
    model = Toy().eval()
    live = capture_regions(model, (x,), {})
    variant = Bench(live, on_cuda=False).build((), ())
    return model, live, variant


def test_a_fused_model_runs_through_the_call_of_its_capture(monkeypatch):
    x = torch.randn(3, 32)
    model, live, variant = captured(x)
    compiled = []
    real = dynamo.compiled_call
    monkeypatch.setattr(dynamo, "compiled_call", lambda *args, **more: compiled.append(args) or real(*args, **more))
    fused = FusedModel(model, live.regions, variant.modules, (x,), {}, live=live)
    assert compiled == []
    ran = []
    forward = variant.modules[0].forward
    variant.modules[0].forward = lambda *args: ran.append(1) or forward(*args)
    expected = model(x)
    with torch.no_grad(), fused.apply():
        torch.testing.assert_close(model(x), expected)
        torch.testing.assert_close(model(x), expected)
        assert len(ran) == 2 and fused.fallbacks == {}
        wide = torch.randn(5, 32)
        torch.testing.assert_close(model(wide), FusedModel.revert(fused)(wide))
    # The call was taken: another model of this capture compiles its own.
    FusedModel(model, live.regions, variant.modules, (x,), {}, live=live)
    assert len(compiled) == 1


def test_a_changed_model_is_compiled_again_and_runs_its_own_ops():
    x = torch.randn(3, 32)
    model, live, variant = captured(x)
    fused = FusedModel(model, live.regions, variant.modules, (x,), {}, live=live)
    replaced = next(name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear))
    owner, _, name = replaced.rpartition(".")
    setattr(model.get_submodule(owner), name, torch.nn.Identity())
    expected = model(x)
    with torch.no_grad(), fused.apply():
        torch.testing.assert_close(model(x), expected)
    assert any("not verified" in reason for reason in fused.fallbacks)


def test_the_capture_keeps_no_input_alive_and_the_collector_on():
    x = torch.randn(3, 32)
    model, live, variant = captured(x)
    assert gc.isenabled()
    fused = FusedModel(model, live.regions, variant.modules, (x,), {}, live=live)
    with torch.no_grad():
        fused.dispatch(x)
    gone = weakref.ref(x)
    del x, live, variant
    gc.collect()
    assert gone() is None
    assert fused.model is model


def test_recalled_chains_are_the_planned_ones_without_the_library():
    capture = profiled("qwen2")[1]
    plan = make_plan(capture, patterns(), min_share=0.0, sources=dict.fromkeys(("add_rmsnorm", "swiglu"), "a paper"))
    answers = {answer.chain_id: answer for answer in plan.answers if isinstance(answer, Match)}
    answers = {name: decode(encode(answer, Match), Match) for name, answer in answers.items()}  # as a report holds them
    again = recall(capture, [fusion.chain for fusion in plan.fusions], answers)
    assert any(fusion.match.named_values and fusion.header.source == "a paper" for fusion in again)
    assert [fusion.program for fusion in again] == [fusion.program for fusion in plan.fusions]
    assert [fusion.sites for fusion in again] == [fusion.sites for fusion in plan.fusions]
    assert [fusion.match for fusion in again] == [fusion.match for fusion in plan.fusions]
    assert [fusion.header for fusion in again] == [fusion.header for fusion in plan.fusions]


def test_a_plan_of_before_has_no_names_and_computes_the_same():
    capture, plan = profiled("qwen2")[1], planned("qwen2")
    bare = {f.chain.id: replace(f.match, operands=(), named_values=(), source="") for f in plan.fusions}
    again = recall(capture, [fusion.chain for fusion in plan.fusions], bare)
    keys = [[layout_key(fusion.program) for fusion in fusions] for fusions in (again, plan.fusions)]
    assert keys[0] == keys[1]
