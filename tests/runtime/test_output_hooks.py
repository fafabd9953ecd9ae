"""Hooks that transformers leaves behind are no change of the model while they collect nothing; any other hook is."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.runtime.output_hooks import collectors_of, is_collecting
from tests.tiny import fuse, gpt2


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
