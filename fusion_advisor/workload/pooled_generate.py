"""``generate`` on static caches of a few sizes that are used again: their addresses stay, so that CUDA graphs serve decode steps.

The prompt goes through a growing cache, whose attention reads the prompt alone, and its keys and values are copied into a static
cache of the pool. From its last token on ``model.generate`` goes on with that one. All else is the model's own ``generate``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fusion_advisor.workload.static_cache import cache_name, in_steps

MOST_CACHES = 2
"""Caches that are kept: those used last."""
_ITS_OWN = (
    "inputs_embeds", "cache_implementation", "assistant_model", "return_dict_in_generate", "prefill_chunk_size",
    "prompt_lookup_num_tokens", "custom_generate", "use_cache", "generation_config",
)  # fmt: skip
"""Arguments with which the model's own ``generate`` is called as it is."""


class PooledGenerate:
    """Stands for a model's ``generate``."""

    def __init__(self, model: nn.Module, *, most_tokens: int) -> None:
        """Begin without a cache.

        Args:
            model: whose calls are fused.
            most_tokens: that a static cache was shown to serve.
        """
        self._model: Any = model
        self._most_tokens = most_tokens
        self._caches: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, as the model does."""
        ids = args[0] if len(args) == 1 else kwargs.get("input_ids", kwargs.get("inputs"))
        total = self._tokens(ids, args, kwargs)
        if total is None or ids is None:
            return self._model.generate(*args, **kwargs)
        rest = {name: value for name, value in kwargs.items() if name not in ("input_ids", "inputs")}
        mask = rest.pop("attention_mask", None)
        mask = torch.ones_like(ids) if mask is None else mask
        cache = self._filled(ids, mask, in_steps(total), rest.get("pad_token_id"))
        return self._model.generate(ids, attention_mask=mask, **{cache_name(self._model): cache}, **rest)

    def _tokens(self, ids: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """Return how many tokens there will be at most; None where the model's own ``generate`` has to do it."""
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] < 2 or len(args) > 1:
            return None
        if any(kwargs.get(name) is not None for name in (*_ITS_OWN, cache_name(self._model), "past_key_values")):
            return None
        config = self._model.generation_config
        if any((kwargs.get(name) or getattr(config, name, None) or 1) > 1 for name in ("num_beams", "num_return_sequences")):
            return None
        new = kwargs.get("max_new_tokens") or (None if kwargs.get("max_length") else getattr(config, "max_new_tokens", None))
        total = ids.shape[1] + new if new else kwargs.get("max_length") or getattr(config, "max_length", None)
        return total if total is not None and ids.shape[1] < total <= self._most_tokens else None

    def _filled(self, ids: torch.Tensor, mask: torch.Tensor, room: int, pad: int | None) -> Any:
        """Return a static cache that holds all tokens of the prompts but the last."""
        from transformers import DynamicCache, StaticCache

        grown: Any = DynamicCache(config=self._model.config)
        # `contiguous` keeps a single row as it lies, with the stride of the longer one.
        rest, seen = (tensor[:, :-1].clone(memory_format=torch.contiguous_format) for tensor in (ids, mask))
        self._model.generate(
            rest, attention_mask=seen, **{cache_name(self._model): grown}, max_new_tokens=1, do_sample=False, pad_token_id=pad
        )  # fmt: skip
        key = (int(ids.shape[0]), room)
        cache: Any = self._caches.pop(key, None)
        if cache is None:
            while len(self._caches) >= MOST_CACHES:
                self._caches.popitem(last=False)
            cache = StaticCache(config=self._model.config, max_cache_len=room)
        self._caches[key] = cache
        tokens = int(ids.shape[1]) - 1
        with torch.no_grad():
            for layer, source in zip(cache.layers, grown.layers, strict=True):
                if not layer.is_initialized:
                    layer.lazy_initialization(source.keys, source.values)
                for ours, theirs in ((layer.keys, source.keys), (layer.values, source.values)):
                    ours[:, :, :tokens].copy_(theirs)
                    ours[:, :, tokens:].zero_()  # an earlier prompt may have left a NaN, which no mask hides
                layer.cumulative_length.fill_(tokens)
        return cache
