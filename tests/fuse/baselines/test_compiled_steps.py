"""torch.compile's training step of a tiny Qwen2: the comparison with eager passes it, with a mask of attention and without."""

from __future__ import annotations

import functools
import types

import pytest
import torch
import transformers
from torch import nn

from fusion_advisor.fuse.baselines.step_check import reference_of
from fusion_advisor.fuse.baselines.training_peers import training_peers
from fusion_advisor.fuse.baselines.training_step import copied_adamw
from tests.fuse.baselines.test_training_peers import way_of


def tiny_qwen(dtype, device="cpu", *, is_masked, length=32):
    """Grouped heads, biases of q, k and v, and a head that shares the embedding's weight; some rows begin with padding."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    config = transformers.Qwen2Config(**sizes, num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0)
    model = transformers.Qwen2ForCausalLM(config).to(device, dtype).train()
    for name, one in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(one, std=0.1)
    ids = torch.randint(256, (2, length), device=device)
    kwargs = {"input_ids": ids, "labels": ids, "use_cache": False}
    if is_masked:
        kwargs["attention_mask"] = torch.ones_like(ids)
        kwargs["attention_mask"][1, : length // 4] = 0
    return model, kwargs


def compiled_check(model, kwargs, *, on_cuda):
    """Check torch.compile's step as a run does: after other steps, after AdamW's, and with gradients that somebody left."""
    reference = reference_of(way_of(model, kwargs))
    peers = training_peers(
        types.SimpleNamespace(model=model), functools.partial(way_of, model, kwargs), on_cuda=on_cuda, max_autotune=False
    )
    way = peers[0].make()
    for _ in range(3):
        way()
    copied_adamw(model, on_cuda=on_cuda).after(way)()
    way.with_gradients()
    found = reference.check(way)
    torch.compiler.reset()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_masked", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_a_compiled_step_with_grouped_heads_and_a_tied_head_pass(dtype, is_masked):
    model, kwargs = tiny_qwen(dtype, is_masked=is_masked)
    found = compiled_check(model, kwargs, on_cuda=False)
    assert found.is_passed and found.gradients == len(list(model.parameters())), found
    assert found.rel_l2 < 2 * found.eager_rel_l2


@pytest.mark.gpu
@pytest.mark.parametrize("is_cudnn", [False, True], ids=["without cuDNN", "with cuDNN"])
@pytest.mark.parametrize("is_masked", [False, True], ids=["no mask", "mask"])
def test_gradients_of_a_compiled_step_pass_on_a_gpu(is_masked, is_cudnn):
    """On an H200 those of Qwen2.5-0.5B were 1.02 off; where this fails with cuDNN alone, its kernel is why."""
    model, kwargs = tiny_qwen(torch.bfloat16, "cuda", is_masked=is_masked, length=256)
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(is_cudnn)
    try:
        found = compiled_check(model, kwargs, on_cuda=True)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)
    assert found.is_passed, found
