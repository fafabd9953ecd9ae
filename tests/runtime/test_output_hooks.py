"""Hooks that transformers leaves behind are no change of the model while they collect nothing; any other hook is."""

from __future__ import annotations

import copy

import pytest
import torch

import fusion_advisor as fa
from fusion_advisor.fuse.plan.options import Budgets
from fusion_advisor.runtime.output_hooks import collectors_of, is_collecting
from tests.tiny import BANDWIDTH, fuse, gpt2


def hooks_in(model):
    return [hook for module in model.modules() for hook in module._forward_hooks.values()]


def same_name():
    def output_capturing_hook(module, args, output):
        return output * 2

    return output_capturing_hook


@pytest.mark.filterwarnings("ignore:fusion-advisor runs the original ops")
def test_a_call_for_hidden_states_leaves_the_fused_calls_fused():
    model, inputs = gpt2()
    with torch.no_grad(), fuse(model, (), inputs, spoil=0.5) as fused:

        def is_fused():
            return not torch.allclose(model(**inputs).logits, model._call_impl(**inputs).logits, atol=0.1)

        for _ in range(2):
            assert is_fused()
        assert len(model(**inputs, output_hidden_states=True).hidden_states) == 3
        for _ in range(3):
            assert is_fused()
        assert "hook" not in " ".join(fused.fallbacks)
        (collector,) = collectors_of(hooks_in(model))
        for _ in range(2):  # a model around this one collects what is inside
            token = collector.set({"hidden_states": []})
            assert is_collecting([collector])
            assert not is_fused()
            collector.reset(token)
            assert is_fused()
        assert sum(count for reason, count in fused.fallbacks.items() if "hook" in reason) == 2
        added = model.transformer.h[0].mlp.register_forward_hook(same_name())
        assert collectors_of(hooks_in(model)) is None
        assert not is_fused()
        added.remove()
        assert is_fused()


def test_only_hooks_with_the_code_of_transformers_are_known():
    model, inputs = gpt2()
    with torch.no_grad():
        model(**inputs, output_hidden_states=True)
    hooks = hooks_in(model)
    assert collectors_of(hooks) and collectors_of([]) == []
    assert collectors_of([*hooks, same_name()]) is None and collectors_of([print]) is None
    hooks[0].__code__ = hooks[0].__code__.replace(co_name="other")
    assert collectors_of(hooks) is None


@pytest.mark.filterwarnings("ignore:fusion-advisor runs the original ops")
def test_a_model_that_always_collects_is_fused_though_apply_takes_its_hooks_out_again():
    model, inputs = gpt2()
    model.config.output_hidden_states = True
    plain = copy.deepcopy(model)
    with torch.no_grad():
        fused = fa.apply(
            model, inputs, keep="verified", effort="quick", compile=False, min_share=0.0, bandwidth=BANDWIDTH, warmup=1, runs=3,
            steps=1, budgets=Budgets(wall_s=0.05),
        )  # fmt: skip
        assert not hooks_in(model)
        before = model(**inputs)  # its guards ask for an attribute that the first call sets
        first = fused.launches
        for _ in range(2):
            results = model(**inputs)
        kept = sum(one.status.value == "kept" for one in fused.report.fusions)
        assert kept and fused.launches >= first + 2 * kept
        want = plain(**inputs)
    assert len(results.hidden_states) == len(before.hidden_states) == len(want.hidden_states) == 3
    for one, other in zip((results.logits, *results.hidden_states), (want.logits, *want.hidden_states), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        added = model.transformer.h[0].mlp.register_forward_hook(same_name())
        count = fused.launches
        assert not torch.allclose(model(**inputs).logits, want.logits, atol=1e-3)
        assert fused.launches == count
        added.remove()
        model(**inputs)
        assert fused.launches > count
