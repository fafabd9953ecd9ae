"""``model.generate`` as a workload: greedy, a static cache, a fixed number of tokens; and the two steps that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusion_advisor.errors import NoStaticCache
from fusion_advisor.runtime.call_tensors import copied
from fusion_advisor.workload.device import is_out_of_memory
from fusion_advisor.workload.static_cache import cache_name, filled_cache, why_no_cache

_SHORT = 8
"""Tokens of a prompt that shows what ``generate`` passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One call of ``generate``.

    Attributes:
        model: as the user has it; whatever stands in its place is called.
        input_ids: the prompt, int64 [batch, tokens], without padding.
        new_tokens: made in any case: an end-of-text token does not stop it.
        model_id: for error messages only.
    """

    model: nn.Module
    input_ids: torch.Tensor
    new_tokens: int
    model_id: str = "model"

    def __call__(self) -> Any:
        """Return what ``generate`` returns, with ``sequences`` and the raw ``logits`` of every new token.

        transformers would compile the decode step by itself on a GPU (``disable_compile``): eager and fused are compared here.
        """
        model: Any = self.model
        return model.generate(
            self.input_ids,
            attention_mask=torch.ones_like(self.input_ids),
            max_new_tokens=self.new_tokens,
            min_new_tokens=self.new_tokens,
            do_sample=False,
            num_beams=1,
            cache_implementation="static",
            disable_compile=True,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
        )

    def steps(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the keyword arguments of the prefill and of the first decode step, as ``generate`` passed them.

        Each has a cache of its own, in the state that it had before that step.

        Raises:
            NoStaticCache: generate refuses the cache, or passes the model something else.
        """
        refuse = {"phase": "generate", "model_id": self.model_id, "class_name": type(self.model).__name__}
        if why := why_no_cache(self.model):
            raise NoStaticCache(**refuse, detail=why)
        try:
            prefill, decode = _first_steps(self.model, self, 2)
        except CannotGenerate as error:
            raise NoStaticCache(**refuse, detail=str(error)) from error
        return prefill, decode


class CannotGenerate(Exception):
    """A model whose ``generate`` takes no two steps with a KV cache; the text says why."""


def growing_steps(model: nn.Module, prompt: Mapping[str, Any], *, is_padded: bool) -> list[dict[str, Any]]:
    """Return the keyword arguments of a prefill and of two decode steps, as ``generate`` passes them with a growing cache.

    From transformers 5.24 on it leaves a mask out that hides nothing.

    Args:
        model: of transformers.
        prompt: keyword arguments of a call, whose ``input_ids``, int64 [batch, tokens], are taken.
        is_padded: hide the first token of the first prompt.

    Raises:
        CannotGenerate: the model has no ``generate``, its call no token ids, or generate passes no cache.
    """
    ids = prompt.get("input_ids")
    if not isinstance(ids, torch.Tensor) or not hasattr(model, "generate"):
        raise CannotGenerate("the call has no input_ids" if hasattr(model, "generate") else "the model has no `generate`")
    if why := why_no_cache(model):
        raise CannotGenerate(why)
    if ids.shape[1] < 2:
        ids = torch.cat([ids, ids], dim=1)
    mask = torch.ones_like(ids)
    if is_padded:
        mask[0, 0] = 0
    generate: Any = model.generate

    def run() -> Any:
        return generate(
            ids,
            attention_mask=mask,
            max_new_tokens=3,
            min_new_tokens=3,
            do_sample=False,
            num_beams=1,
            disable_compile=True,
            pad_token_id=0,
        )

    with torch.no_grad():
        return _first_steps(model, run, 3)


def fixed_step(model: nn.Module, prompt: Mapping[str, Any], *, model_id: str) -> dict[str, Any]:
    """Return the keyword arguments of a decode step, as ``generate`` passes them with a static cache that holds a prompt.

    Args:
        model: of transformers.
        prompt: keyword arguments of a call, whose ``input_ids``, int64 [batch, tokens], are taken.
        model_id: for error messages only.

    Raises:
        CannotGenerate: the model has no static cache, generate passes another one, or the model computes something else with it.
    """
    ids = prompt["input_ids"][:, :_SHORT]  # the cache has room for the steps below
    if ids.shape[1] < 2:
        ids = torch.cat([ids, ids], dim=1)
    try:
        cache, _ = filled_cache(model, ids[:, :-1], maximum=None, phase="generate", model_id=model_id)
    except NoStaticCache as error:
        raise CannotGenerate(str(error)) from error
    generate: Any = model.generate

    def run() -> Any:
        return generate(
            ids, attention_mask=torch.ones_like(ids), **{cache_name(model): cache}, max_new_tokens=3, min_new_tokens=3,
            do_sample=False, disable_compile=True, pad_token_id=0,
        )  # fmt: skip

    with torch.no_grad():
        steps = _first_steps(model, run, 2)
    if steps[0]["input_ids"].shape[1] != 1:
        raise CannotGenerate("generate runs the prompt again that its static cache holds")
    if not _is_as_without_cache(model, steps[0], ids):
        raise CannotGenerate("the model computes something else with a static cache than without one")
    return steps[0]


def _is_as_without_cache(model: Any, step: Mapping[str, Any], ids: torch.Tensor) -> bool:
    """Whether a step has the logits of the whole text: GPT-Neo's windows, for one, count back from the end of the cache."""
    with torch.no_grad():
        found = model(**copied(step, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf))
        wanted = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    ours, whole = found.logits[:, -1], wanted.logits[:, -1]
    return float((ours - whole).norm()) <= 2 * torch.finfo(whole.dtype).eps ** 0.5 * float(whole.norm())


def _first_steps(model: nn.Module, generate: Callable[[], Any], count: int) -> list[dict[str, Any]]:
    """Return what ``generate`` passes the model in its first calls.

    Raises:
        CannotGenerate: it refuses, or passes no cache.
    """
    seen: list[dict[str, Any]] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(seen) < count and not args:
            seen.append(copied(kwargs, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf))

    hook = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        generate()
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CannotGenerate(lines[0]) from error
    finally:
        hook.remove()
    if len(seen) < count or not hasattr(seen[1].get(cache_name(model)), "get_seq_length"):
        raise CannotGenerate("generate passes its forward no cache")
    return seen
