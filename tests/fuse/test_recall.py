"""What makes a saved plan quick to put in place: no second trace, no search for chains, only the kernels that were kept."""

from __future__ import annotations

import gc
import weakref

import torch

from fusion_advisor.capture import torch_internals
from fusion_advisor.capture.graph import capture_regions
from fusion_advisor.fuse.bench import Bench
from fusion_advisor.fuse.model import FusedModel
from fusion_advisor.fuse.plan import recall
from fusion_advisor.library.patterns import library_patterns
from fusion_advisor.records import Match
from tests.tiny import Toy, planned, profiled


def captured(x):
    model = Toy().eval()
    live = capture_regions(model, (x,), {})
    variant = Bench(live, on_cuda=False).build((), ())
    return model, live, variant


def test_a_fused_model_runs_through_the_call_of_its_capture(monkeypatch):
    x = torch.randn(3, 32)
    model, live, variant = captured(x)
    compiled = []
    real = torch_internals.compiled_call
    monkeypatch.setattr(torch_internals, "compiled_call", lambda *args, **more: compiled.append(args) or real(*args, **more))
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


def test_recalled_chains_are_the_planned_ones_and_trace_their_own_kernels_only():
    capture, plan = profiled("qwen2")[1], planned("qwen2")
    matched = [fusion for fusion in plan.fusions if fusion.match.is_library]
    variants = {fusion.match.kernel: {fusion.match.variant} for fusion in matched}
    assert variants
    few, sources = library_patterns(only=variants)
    assert {(pattern.kernel, pattern.variant) for pattern in few} <= {
        (kernel, variant) for kernel, names in variants.items() for variant in names
    }
    again = recall(capture, [fusion.chain for fusion in plan.fusions], few, sources)
    assert [fusion.program for fusion in again] == [fusion.program for fusion in plan.fusions]
    assert [fusion.sites for fusion in again] == [fusion.sites for fusion in plan.fusions]
    assert [fusion.match for fusion in again] == [fusion.match for fusion in plan.fusions]
    assert all(isinstance(fusion.match, Match) for fusion in again)
