"""``generate`` on static caches of a few sizes that are used again: their addresses stay, so that CUDA graphs serve decode steps.

The prompt goes through a growing cache, whose attention reads the prompt alone, and its keys and values are copied into a static
cache of the pool. From its last token on ``model.generate`` goes on with that one. All else is the model's own ``generate``, and
the reason is said once: its steps are served on a growing cache, without CUDA graphs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fusion_advisor.runtime.fallback_warning import warn_caller
from fusion_advisor.workload.static_cache import cache_name, in_steps

MOST_CACHES = 2
"""Caches that are kept: those used last."""
_OF_THE_CALL = {
    "inputs_embeds": "the prompt is given as embeddings",
    "assistant_model": "another model drafts tokens, and a step checks several of them",
    "custom_generate": "another way to decode was given",
    "dola_layers": "it decodes by contrasting layers",
    "penalty_alpha": "it decodes by contrastive search",
}
"""Arguments with which the model's own ``generate`` is called, and why."""
_OF_THE_CONFIG = {
    "cache_implementation": "a kind of cache was chosen",
    "prompt_lookup_num_tokens": "tokens of the prompt are drafts, and a step checks several of them",
    "prefill_chunk_size": "the prompt is to go through in chunks",
    "return_dict_in_generate": "the caller gets the cache, which the next call would write to",
    "assistant_early_exit": "early layers draft tokens, and a step checks several of them",
}
"""The same for settings, which the call or a configuration has."""
_SEARCHES = ("num_beams", "num_return_sequences", "num_beam_groups")


class PooledGenerate:
    """Stands for a model's ``generate``.

    Attributes:
        refusals: why calls went to the model's own ``generate``, and how often.
    """

    def __init__(self, model: nn.Module, *, most_tokens: int) -> None:
        """Begin without a cache.

        Args:
            model: whose calls are fused.
            most_tokens: that a static cache was shown to serve.
        """
        self._model: Any = model
        self._most_tokens = most_tokens
        self._caches: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._windows: bool | None = None
        self.refusals: dict[str, int] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, as the model does."""
        ids: Any = args[0] if len(args) == 1 else kwargs.get("input_ids", kwargs.get("inputs"))
        settings = _Settings(kwargs, (kwargs.get("generation_config"), self._model.generation_config))
        reason = self._why_own(ids, args, kwargs, settings)
        if reason:
            self.refusals[reason] = self.refusals.get(reason, 0) + 1
            if self.refusals[reason] == 1:
                warn_caller(f"fusion-advisor generates on a growing cache, without CUDA graphs: {reason}")
            return self._model.generate(*args, **kwargs)
        rest = {name: value for name, value in kwargs.items() if name not in ("input_ids", "inputs")}
        mask = rest.pop("attention_mask", None)
        mask = torch.ones_like(ids) if mask is None else mask.long() if mask.dtype == torch.bool else mask
        key = (int(ids.shape[0]), in_steps(settings.most_tokens(int(ids.shape[1]))))
        # While it is used it is not in the pool: another thread may generate, or a stopping criterion or a streamer of this call.
        cache = self._taken(key)
        try:
            self._fill(cache, ids, mask, settings.get("pad_token_id"))
            return self._model.generate(ids, attention_mask=mask, **{cache_name(self._model): cache}, **rest)
        finally:
            self._put_back(key, cache)

    def _why_own(self, ids: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: _Settings) -> str:
        """Say why the model's own ``generate`` has to do it; empty where a static cache serves it."""
        given = [reason for name, reason in _OF_THE_CALL.items() if kwargs.get(name) is not None]
        chosen = [reason for name, reason in _OF_THE_CONFIG.items() if settings.get(name)]
        if given or chosen:
            return (given + chosen)[0]
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or len(args) > 1:
            return "the prompt is no tensor of token ids"
        if kwargs.get(cache_name(self._model)) is not None or kwargs.get("past_key_values") is not None:
            return "the call brings its own cache"
        if settings.get("use_cache") is False or getattr(self._model.config, "use_cache", None) is False:
            return "use_cache is off"
        if any((settings.get(name) or 1) > 1 for name in _SEARCHES):
            return "several sequences come of one prompt, and beams change rows of the cache between steps"
        if self._has_windows():
            return "layers have a sliding window, and their cache ends with it"
        return _why_not_split(ids, kwargs, settings) or self._why_too_long(ids, settings)

    def _why_too_long(self, ids: torch.Tensor, settings: _Settings) -> str:
        """Say why a static cache may have no room for all tokens."""
        most = settings.most_tokens(int(ids.shape[1]))
        if not most:
            return "neither max_new_tokens nor max_length says how many tokens there will be"
        if not ids.shape[1] < most <= self._most_tokens:
            return f"it may come to more than the {self._most_tokens} tokens for which static caches were tried"
        return ""

    def _has_windows(self) -> bool:
        """Whether a layer keeps the last tokens alone: its cache lies in another order then."""
        if self._windows is None:
            from transformers import DynamicCache

            cache: Any = DynamicCache(config=self._model.config)
            self._windows = any(getattr(layer, "is_sliding", False) for layer in cache.layers)
        return self._windows

    def _taken(self, key: tuple[int, int]) -> Any:
        """Take a static cache out of the pool, or make one; ``key`` is its rows and its room."""
        from transformers import StaticCache

        cache = self._caches.pop(key, None)
        if cache is None:
            while len(self._caches) >= MOST_CACHES:
                self._caches.popitem(last=False)
            with torch.inference_mode(False):  # the next call may come without inference mode
                cache = StaticCache(config=self._model.config, max_cache_len=key[1])
        return cache

    def _put_back(self, key: tuple[int, int], cache: Any) -> None:
        self._caches[key] = cache
        while len(self._caches) > MOST_CACHES:
            self._caches.popitem(last=False)

    def _fill(self, cache: Any, ids: torch.Tensor, mask: torch.Tensor, pad: int | None) -> None:
        """Let a static cache hold all tokens of the prompts but the last."""
        from transformers import DynamicCache

        grown: Any = DynamicCache(config=self._model.config)
        # `contiguous` keeps a single row as it lies, with the stride of the longer one.
        rest, seen = (tensor[:, :-1].clone(memory_format=torch.contiguous_format) for tensor in (ids, mask))
        self._model.generate(
            rest, attention_mask=seen, **{cache_name(self._model): grown}, max_new_tokens=1, do_sample=False, pad_token_id=pad
        )  # fmt: skip
        tokens = int(ids.shape[1]) - 1
        with torch.no_grad():
            for layer, source in zip(cache.layers, grown.layers, strict=True):
                if not layer.is_initialized:
                    with torch.inference_mode(False):
                        layer.lazy_initialization(source.keys, source.values)
                for ours, theirs in ((layer.keys, source.keys), (layer.values, source.values)):
                    ours[:, :, :tokens].copy_(theirs)
                    ours[:, :, tokens:].zero_()  # an earlier prompt may have left a NaN, which no mask hides
                layer.cumulative_length.fill_(tokens)


class _Settings:
    """What a call and its configurations say, the call first."""

    def __init__(self, kwargs: Mapping[str, Any], configs: tuple[Any, ...]) -> None:
        self._kwargs = kwargs
        self._configs = [config for config in configs if config is not None]

    def get(self, name: str) -> Any:
        """Return a setting; None where nothing says it."""
        said = (self._kwargs.get(name), *(getattr(config, name, None) for config in self._configs))
        return next((value for value in said if value is not None), None)

    def knows(self, name: str) -> bool:
        """Whether a name is one of a configuration's."""
        return any(hasattr(config, name) for config in self._configs)

    def most_tokens(self, prompt: int) -> int:
        """Return how many tokens there will be at most, the prompt's among them; 0 where nothing says it.

        A length that nobody chose counts new tokens.
        """
        new, whole = self.get("max_new_tokens"), self.get("max_length")
        if new:
            return prompt + int(new)
        usual = getattr(type(self._configs[-1])(), "max_length", None)
        return int(whole or 0) + (prompt if whole and whole == usual else 0)


def _why_not_split(ids: torch.Tensor, kwargs: Mapping[str, Any], settings: _Settings) -> str:
    """Say why a prompt cannot be split ahead of its last token; empty where it can."""
    if ids.shape[1] < 2:
        return "the prompt is one token"
    mask = kwargs.get("attention_mask")
    if mask is None and _may_be_padded(ids, settings):
        return "the prompts hold the padding token, and no attention_mask says where"
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != ids.shape):
        return "its attention_mask is not of the prompts' shape"
    others = {name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and not settings.knows(name)}
    return "the prompts come with other tensors" if others - {"input_ids", "inputs", "attention_mask"} else ""


def _may_be_padded(ids: torch.Tensor, settings: _Settings) -> bool:
    """Whether ``generate`` would take tokens of the prompts for padding: where the padding token ends no text either."""
    pad, ends = settings.get("pad_token_id"), settings.get("eos_token_id")
    ends = ends if isinstance(ends, list | tuple) else [ends]
    return pad is not None and pad not in ends and bool((ids == pad).any())
