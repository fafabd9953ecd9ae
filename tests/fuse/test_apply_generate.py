"""``generate`` with prompts of any length and batch through one plan: eager's tokens, traced once, saved and put in again."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch._dynamo.utils

import fusion_advisor as fa
from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.errors import SizeRejected
from fusion_advisor.runtime.torch_internals import module_call
from tests import tiny

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="kernels of a CPU need a C++ compiler: apt-get install g++")

RANGES = "batch=1..8,seq=1..32,cached=1..60"


def served(model, kwargs, **options):
    return fa.apply(model, kwargs, shapes=RANGES, keep="verified", compile=False, **options)


def prompts(generator):
    """A batch of prompts, half of the batches padded on the left, and how ``generate`` goes on."""
    batch, length = generator.randint(1, 8), generator.randint(1, 32)
    ids = torch.randint(1, 200, (batch, length))
    mask = torch.ones_like(ids)
    if generator.random() < 0.5:
        for row in mask:
            row[: generator.randint(0, length - 1)] = 0
    return {
        "input_ids": ids, "attention_mask": mask, "max_new_tokens": generator.randint(1, 28), "pad_token_id": 0,
        "do_sample": generator.random() < 0.3, "disable_compile": True,
    }  # fmt: skip


def tokens_of(model, call, *, fused):
    """What ``generate`` returns with the same random numbers; without the fused call where that is asked."""
    torch.manual_seed(1)
    in_place = module_call.compiled_call_of(model)
    if not fused:
        module_call.set_compiled_call(model, None)
    try:
        return model.generate(**call)
    finally:
        module_call.set_compiled_call(model, in_place)


def same_tokens(model, count, seed=0):
    """Whether each of some random calls gives eager's tokens."""
    generator = random.Random(seed)
    torch.manual_seed(seed)
    calls = [prompts(generator) for _ in range(count)]
    # One way after the other: to take the fused call out and in again changes the model each time.
    ours, theirs = ([tokens_of(model, call, fused=fused) for call in calls] for fused in (True, False))
    return [*map(torch.equal, ours, theirs)]


def traces():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "llama"])
def test_tokens_are_eagers_for_any_prompts(name):
    model, kwargs = getattr(tiny, name)()
    with served(model, kwargs) as fused:
        traced = traces()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert all(same_tokens(model, 24))
        assert traces() == traced
        assert fused.fallbacks == {}
        assert fused.launches > 24 * 5
        call = {"input_ids": torch.randint(1, 200, (2, 9)), "num_beams": 3, "max_new_tokens": 12, "pad_token_id": 0}
        assert torch.equal(tokens_of(model, call, fused=True), tokens_of(model, call, fused=False))
        assert fused.fallbacks == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_caches_of_the_pool_give_eagers_tokens_and_keep_their_addresses(name):
    model, kwargs = getattr(tiny, name)()
    with served(model, kwargs) as fused:
        traced, generator = traces(), random.Random(3)
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "fusion-advisor generates on a growing cache, .*: the prompt is one token")
            for call in [prompts(generator) for _ in range(16)]:
                expected = tokens_of(model, call, fused=False)
                torch.manual_seed(1)
                assert torch.equal(fused.generate(**call), expected)
        assert traces() == traced and fused.fallbacks == {} and set(fused._generate.refusals) <= {"the prompt is one token"}
        call = {"input_ids": torch.randint(1, 200, (2, 9)), "max_new_tokens": 5, "pad_token_id": 0}
        places = []
        for _ in range(2):
            fused.generate(**call)
            (cache,) = [kept for key, kept in fused._generate._caches.items() if key == (2, 64)]
            places.append([layer.keys.data_ptr() for layer in cache.layers])
        assert places[0] == places[1]
    assert torch.equal(fused.generate(**call), model.generate(**call))  # reverted: the model's own


@pytest.mark.slow
def test_a_saved_plan_generates_in_another_model(tmp_path):
    model, kwargs = tiny.qwen2()
    report = served(model, kwargs, run_dir=tmp_path).report
    calls = {piece.call for piece in report.shapes.pieces}
    assert {"prefill", "decode", "static decode"} <= calls <= {*calls, "padded prefill", "padded decode"}
    assert all(not point.reason for piece in report.shapes.pieces for point in piece.points)
    model, kwargs = tiny.qwen2()
    with fa.apply(model, kwargs, plan=fa.load_plan(tmp_path)) as fused:
        traced = traces()
        assert all(same_tokens(model, 8, seed=1))
        assert traces() == traced
        assert fused.fallbacks == {}
        longer = {"input_ids": torch.randint(1, 200, (9, 5)), "max_new_tokens": 3, "pad_token_id": 0}
        with pytest.warns(UserWarning, match=r"batch is outside of batch=1\.\.8"):
            assert torch.equal(tokens_of(model, longer, fused=True), tokens_of(model, longer, fused=False))


def test_a_cache_that_leaves_no_position_is_refused_before_any_work():
    model, kwargs = tiny.gpt2()
    with pytest.raises(SizeRejected, match="it has 64 positions"):
        fa.apply(model, kwargs, shapes="batch=1..2,cached=1..64")
