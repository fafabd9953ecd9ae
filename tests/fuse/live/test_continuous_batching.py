"""A fused model in transformers' continuous batching: the model's own tokens, by its own ops, with a reason of its own."""

from __future__ import annotations

import warnings

import pytest

import fusion_advisor as fa
from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.fuse.live.call_difference import CONTINUOUS_BATCHING, is_continuous_batching
from tests import tiny

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [3] * 12]


def tokens_of(model):
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)  # without, it takes most of the host's memory
    found = model.generate_batch(PROMPTS, generation_config=config, continuous_batching_config=small)
    assert all(one.error is None for one in found.values())
    return [found[name].generated_tokens for name in sorted(found)]


@pytest.mark.skipif(find_compiler() is None, reason="kernels of a CPU need a C++ compiler: apt-get install g++")
def test_steps_of_continuous_batching_run_the_original_ops_and_say_why():
    model, inputs = tiny.qwen2()
    try:
        expected = tokens_of(model)
    except MemoryError:  # before 5.24, where psutil is not installed
        pytest.skip("transformers before 5.24 asks psutil how much memory the CPU has: pip install psutil")
    with fa.apply(model, inputs, effort="quick") as fused, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert tokens_of(fused) == expected
    assert [*fused.fallbacks] == [CONTINUOUS_BATCHING]
    assert fused.fallbacks[CONTINUOUS_BATCHING] >= 4
    assert len([one for one in told if CONTINUOUS_BATCHING in str(one.message)]) == 1


def test_a_call_with_a_cache_alone_is_not_a_step_of_continuous_batching():
    assert not is_continuous_batching({"cache": None, "input_ids": None})
    assert is_continuous_batching({"cache": None, "read_index": [], "write_index": []})
