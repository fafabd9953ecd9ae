"""The calls whose sizes may vary: the example's own, or both steps of ``generate`` where tokens in a KV cache are named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fusion_advisor.capture.sizes.open_capture import Dims, call_tensors
from fusion_advisor.errors import UsageError
from fusion_advisor.fuse.plan.size_ranges import CACHED, ShapeRequest
from fusion_advisor.fuse.shapes.call_sizes import dims_of
from fusion_advisor.records import SizeRange
from fusion_advisor.workload.generate import CannotGenerate, growing_steps
from fusion_advisor.workload.load import LoadedWorkload
from fusion_advisor.workload.static_cache import cache_name

PREFILL, DECODE = "prefill", "decode"
PADDED = "padded "
"""Ahead of the name of a step whose prompts are of different lengths: such a step has a mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangedCall:
    """A way in which the model is called, and what may vary in it.

    Attributes:
        name: ``prefill``, ``decode``, ``padded prefill`` or ``padded decode`` of ``generate``; empty for the example call.
        args: of one such call.
        kwargs: of the same.
        dims: names of its tensors' dims.
        ranges: of these names.
    """

    name: str = ""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dims: Dims
    ranges: tuple[SizeRange, ...]

    @property
    def keeps_a_cache(self) -> bool:
        """Whether each call of it makes new tensors of its cache: at new addresses, which no CUDA graph knows."""
        return bool(self.name)

    @property
    def shown_dims(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The dims by path, a cache's layers but for the first left out."""
        shown = [(path, names) for path, names in self.dims.items() if ".layers." not in path or ".layers.0." in path]
        return tuple((f"{self.name} {path}".lstrip(), names) for path, names in shown)


def ranged_calls(loaded: LoadedWorkload, request: ShapeRequest) -> list[RangedCall]:
    """Return the calls that ranges are asked for.

    Args:
        loaded: the model and its example call.
        request: with ``cached`` among its ranges for the steps of ``generate``.

    Raises:
        UsageError: a name is no dim of the call, or the model's ``generate`` has no growing cache of keys and values.
    """
    if all(one.name != CACHED for one in request.ranges):
        dims = dims_of(loaded.args, loaded.kwargs, request)
        return [RangedCall(args=loaded.args, kwargs=loaded.kwargs, dims=dims, ranges=request.ranges)]
    if request.dims:
        raise UsageError(
            detail="the dims of generate's calls are found by themselves", help=f"name {CACHED} in text ranges alone"
        )
    try:
        steps = growing_steps(loaded.model, loaded.kwargs, is_padded=False)
        padded = growing_steps(loaded.model, loaded.kwargs, is_padded=True)
        _require_growing(loaded, steps[1])
    except CannotGenerate as error:
        raise UsageError(
            detail=f"`{CACHED}` is the number of tokens in the KV cache of `generate`, and {error}",
            help=f"leave {CACHED} out of --shapes",
        ) from error
    names = [one.name for one in request.ranges]
    found: list[RangedCall] = []
    for name, kwargs, rows in (
        (PREFILL, steps[0], "seq"), (DECODE, steps[1], CACHED),
        (PADDED + PREFILL, padded[0], "seq"), (PADDED + DECODE, padded[1], CACHED),
    ):  # fmt: skip
        if any(call.kwargs.keys() == kwargs.keys() and call.name.endswith(name.removeprefix(PADDED)) for call in found):
            continue  # its mask is passed with any prompts
        dims = {path: _known(names, _usual(path, tensor, rows)) for path, tensor in call_tensors((), kwargs).items()}
        open_dims = {path: dim_names for path, dim_names in dims.items() if any(dim_names)}
        ranges = tuple(one for one in request.ranges if any(one.name in dim_names for dim_names in open_dims.values()))
        if name.startswith(PADDED):  # a prompt of one token has no room for padding
            ranges = tuple(one if one.name == "batch" else replace(one, least=max(2, one.least)) for one in ranges)
        if ranges and all(one.least <= one.most for one in ranges):
            found.append(RangedCall(name=name, kwargs=kwargs, dims=open_dims, ranges=ranges))
    return found


def _usual(path: str, tensor: torch.Tensor, rows: str) -> tuple[str, ...]:
    """Return the names of a tensor's dims in a step of ``generate``.

    Args:
        path: of the tensor.
        tensor: of the call.
        rows: ``seq`` in the prefill, ``cached`` in a decode step.
    """
    if ".layers." in path:
        return ("batch", "", CACHED, "") if tensor.dim() == 4 else ("",) * tensor.dim()
    if tensor.dim() != 2:
        return ("",) * tensor.dim()
    if rows == "seq":
        return ("batch", "seq")
    return ("batch", f"{CACHED}+1" if path.startswith("attention_mask") else "")


def _known(names: list[str], dims: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name if name.partition("+")[0] in names else "" for name in dims)


def _require_growing(loaded: LoadedWorkload, decode: Mapping[str, Any]) -> None:
    """Look at a cache: every tensor in it must hold one row for each token.

    Raises:
        CannotGenerate: it holds something else.
    """
    if getattr(getattr(loaded.model, "config", None), "is_encoder_decoder", False):
        raise CannotGenerate("the model is an encoder-decoder")
    name = cache_name(loaded.model)
    tokens = int(decode[name].get_seq_length())
    for path, tensor in call_tensors((), {name: decode[name]}).items():
        if tensor.dim() != 4 or tensor.shape[2] != tokens:
            raise CannotGenerate(f"its cache holds `{path}` of shape {list(tensor.shape)} after {tokens} tokens")
