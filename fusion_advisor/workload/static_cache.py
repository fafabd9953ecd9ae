"""A static KV cache, filled as a prompt would fill it.

transformers' ``StaticCache`` allocates room for every position once and writes each token's keys and values in place, at a
position that it counts in a tensor: every decode step has the same shapes, and so one graph serves them all.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from fusion_advisor.errors import NoStaticCache
from fusion_advisor.workload.device import is_out_of_memory

_ROOM = 64
"""Room is made in blocks of so many positions: attention kernels want rows of whole vectors, and one token more must fit."""
_NAMES = ("cache", "past_key_values")
"""Names of the cache argument in transformers: from 5.24 on, and the older name, which still works with a warning."""


def cache_name(model: nn.Module) -> str:
    """Return the name of the argument that a model's forward takes its KV cache by; empty where it takes none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in _NAMES if name in parameters), "")


def why_no_cache(model: nn.Module) -> str:
    """Say why a model has no static KV cache; empty where it may have one."""
    if not cache_name(model):
        return f"its forward takes no {' or '.join(_NAMES)}"
    return "it keeps a running state, not keys and values" if getattr(model, "_is_stateful", False) else ""


def in_steps(tokens: int) -> int:
    """Return how many positions a cache has for so many tokens: a power of two of blocks, so that few sizes come up."""
    blocks = -(-tokens // _ROOM)
    return int(_ROOM * (1 << (blocks - 1).bit_length()))


def filled_cache(model: nn.Module, prompt: torch.Tensor, *, maximum: int | None, phase: str, model_id: str) -> tuple[Any, int]:
    """Prefill a prompt into a static cache.

    Args:
        model: a causal language model of transformers, on its device.
        prompt: token ids, int64 [batch, tokens].
        maximum: positions the model has; None where there is no limit.
        phase: for the error message only.
        model_id: for the error message only.

    Returns:
        The cache (bf16, fp16 or fp32 as the model computes) and the positions it has room for.

    Raises:
        NoStaticCache: the model has another kind of state, or transformers refuses to make the cache.
    """
    from transformers import StaticCache

    refuse = {"phase": phase, "model_id": model_id, "class_name": type(model).__name__}
    if why := why_no_cache(model):
        raise NoStaticCache(**refuse, detail=why)
    tokens = prompt.shape[1]
    room = (tokens // _ROOM + 1) * _ROOM
    if maximum is not None:
        room = min(room, maximum)
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    config: Any = model.config
    cache = StaticCache(config=config, max_cache_len=room)
    try:
        with torch.no_grad():
            model(input_ids=prompt, **{cache_name(model): cache}, use_cache=True, **keep)
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise NoStaticCache(**refuse, detail=lines[0]) from error
    cached = int(cache.get_seq_length())
    if cached != tokens:
        raise NoStaticCache(**refuse, detail=f"after {tokens} tokens its cache holds {cached}")
    return cache, room
