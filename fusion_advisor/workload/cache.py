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

_ROOM = 64
"""Room is made in blocks of so many positions: attention kernels want rows of whole vectors, and one token more must fit."""


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
    parameters = inspect.signature(model.forward).parameters
    if "past_key_values" not in parameters or "use_cache" not in parameters:
        raise NoStaticCache(**refuse, detail="its forward takes no past_key_values")
    if getattr(model, "_is_stateful", False):
        raise NoStaticCache(**refuse, detail="it keeps a running state, not keys and values")
    tokens = prompt.shape[1]
    room = (tokens // _ROOM + 1) * _ROOM
    if maximum is not None:
        room = min(room, maximum)
    keep = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    config: Any = model.config
    cache = StaticCache(config=config, max_cache_len=room)
    try:
        with torch.no_grad():
            model(input_ids=prompt, past_key_values=cache, use_cache=True, **keep)
    except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise NoStaticCache(**refuse, detail=lines[0]) from error
    held = int(cache.get_seq_length())
    if held != tokens:
        raise NoStaticCache(**refuse, detail=f"after {tokens} tokens its cache holds {held}")
    return cache, room
