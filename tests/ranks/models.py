"""Factories of tiny models for runs that torchrun starts."""

from __future__ import annotations

import torch

from tests.tiny import llama, qwen2

IDS = torch.arange(1, 65).view(1, 64)


def tiny_llama():
    """A Llama of two layers and one step's inputs."""
    model, kwargs = llama()
    return model, {**kwargs, "input_ids": IDS}


def tiny_qwen2():
    """A Qwen2 of two layers and one step's inputs."""
    model, kwargs = qwen2()
    return model, {**kwargs, "input_ids": IDS}


def _starcoder2(**sizes):
    """A Starcoder2 with LayerNorm and biases everywhere; transformers' biases are zeros, which nobody would miss."""
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    torch.manual_seed(0)
    config = Starcoder2Config(bos_token_id=0, eos_token_id=0, residual_dropout=0.0, embedding_dropout=0.0, **sizes)
    model = Starcoder2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def tiny_starcoder2():
    """A Starcoder2 of two layers and one step's inputs."""
    model = _starcoder2(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=200,
        max_position_embeddings=64,
    )  # fmt: skip
    return model, {"input_ids": IDS, "use_cache": False}


def starcoder2():
    """Eight layers of Starcoder2-7B in bf16 and a step of 64 tokens, for GPUs."""
    with torch.device("cuda"):
        model = _starcoder2(
            num_hidden_layers=8, hidden_size=4608, intermediate_size=18432, num_attention_heads=36, num_key_value_heads=4,
            vocab_size=49152, max_position_embeddings=16384,
        )  # fmt: skip
    return model.bfloat16(), {"input_ids": IDS.cuda(), "use_cache": False}
