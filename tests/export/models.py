"""Tiny models with random weights, and a run of each that kept all that is right."""

from __future__ import annotations

import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import fusion_advisor
from fusion_advisor.fuse.plan.options import Budgets
from fusion_advisor.workload.static_cache import cache_name
from tests.tiny import BANDWIDTH

QUICK = {
    "runs": 3, "warmup": 1, "steps": 1, "compile": False, "keep": "verified", "remembers": False,
    "budgets": Budgets(wall_s=0.02, decide_s=0.1), "bandwidth": BANDWIDTH,
}  # fmt: skip
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


def gpt2(layers=3):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_embd=64, n_head=2, vocab_size=97, n_positions=32, **_TOKENS)
    return GPT2LMHeadModel(config).eval(), {"input_ids": torch.randint(0, 97, (2, 16)), "use_cache": False}


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1, vocab_size=97
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), {"input_ids": torch.randint(0, 97, (2, 16)), "use_cache": False}


def bert():
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=3, hidden_size=64, intermediate_size=96, num_attention_heads=2, vocab_size=97,
        max_position_embeddings=32,
    )  # fmt: skip
    return BertModel(config).eval(), {"input_ids": torch.randint(0, 97, (2, 16))}


def decode_step(model, ids, cache):
    """The arguments of a decode step after a prompt, which fills the cache.

    Args:
        model: a causal language model.
        ids: the prompt, int64 [batch, tokens].
        cache: empty.

    Raises:
        AssertionError: the model did not take the cache: by another name it would be ignored.
    """
    name = cache_name(model)
    with torch.no_grad():
        model(input_ids=ids, **{name: cache}, use_cache=True)
    assert int(cache.get_seq_length()) == ids.shape[1]
    places = torch.full((ids.shape[0], 1), ids.shape[1], device=ids.device)
    return {"input_ids": ids[:, :1].contiguous(), name: cache, "position_ids": places, "use_cache": True}


def fused(make, **options):
    """Return the model, its inputs and the fused model."""
    model, inputs = make()
    return model, inputs, fusion_advisor.apply(model, inputs, **{**QUICK, **options})
