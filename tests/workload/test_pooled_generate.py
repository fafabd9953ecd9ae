"""What goes through the pool of static caches, and what is the model's own ``generate``."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.workload.pooled_generate import MOST_CACHES, PooledGenerate
from fusion_advisor.workload.static_cache import in_steps
from tests import tiny

IDS = torch.arange(1, 13).reshape(2, 6)


class Own:
    """Counts the calls of a model's own ``generate`` by the kind of their cache."""

    def __init__(self, model):
        self.model, self.seen = model, []
        self.own = model.generate

    def generate(self, *args, **kwargs):
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        self.seen.append(type(cache).__name__)
        return self.own(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.model, name)


@pytest.fixture
def own():
    return Own(tiny.gpt2()[0])


def pooled(own, most_tokens=64):
    found = PooledGenerate(own.model, most_tokens=most_tokens)
    found._model = own
    return found


def test_a_prompt_goes_through_a_growing_cache_and_on_with_a_static_one(own):
    expected = own.own(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=5, pad_token_id=0)
    assert torch.equal(pooled(own)(IDS, max_new_tokens=5, pad_token_id=0), expected)
    assert own.seen == ["DynamicCache", "StaticCache"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 2},
        {"do_sample": True, "num_return_sequences": 2},
        {"return_dict_in_generate": True},
        {"cache_implementation": "static"},
        {"max_new_tokens": 30},
        {"input_ids": IDS[:, :1]},
    ],
)
def test_what_the_pool_cannot_serve_is_the_models_own(own, arguments):
    pooled(own, most_tokens=32)(**{"input_ids": IDS, "max_new_tokens": 3, "pad_token_id": 0, **arguments})
    assert own.seen == ["NoneType"]


def test_the_length_may_be_said_as_a_whole(own):
    assert pooled(own)(input_ids=IDS, max_length=9, pad_token_id=0, eos_token_id=None).shape == (2, 9)
    assert own.seen == ["DynamicCache", "StaticCache"]


def test_few_caches_are_kept_those_used_last():
    model, _ = tiny.gpt2()
    generate = PooledGenerate(model, most_tokens=64)
    for rows in (1, 2, 3, 2):
        generate(IDS[:1].repeat(rows, 1), max_new_tokens=2, pad_token_id=0)
    assert list(generate._caches) == [(3, 64), (2, 64)] and MOST_CACHES == 2


def test_a_nan_of_an_earlier_prompt_is_gone():
    model, _ = tiny.gpt2()
    generate = PooledGenerate(model, most_tokens=64)
    expected = generate(IDS, max_new_tokens=4, pad_token_id=0)
    for layer in generate._caches[2, 64].layers:
        layer.values.fill_(float("nan"))
        layer.keys.fill_(float("nan"))
    assert torch.equal(generate(IDS, max_new_tokens=4, pad_token_id=0), expected)


@pytest.mark.parametrize(("tokens", "room"), [(1, 64), (64, 64), (65, 128), (129, 256), (257, 512), (8193, 16384)])
def test_rooms_are_few(tokens, room):
    assert in_steps(tokens) == room
