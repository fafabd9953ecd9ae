"""The calls whose sizes may vary: the example's own, or both steps of ``generate`` where tokens in a KV cache are named."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fusion_advisor.capture.sizes.open_capture import Dims, OneSizeOnly, OpenCapture, Sizes, base_of, call_tensors, sizes_of
from fusion_advisor.errors import UsageError
from fusion_advisor.fuse.plan.size_ranges import CACHED, MOST_NAMES, ShapeRequest
from fusion_advisor.fuse.shapes.call_sizes import dims_of, resized
from fusion_advisor.fuse.shapes.pieces import Capture, Piece, PieceFinder
from fusion_advisor.fuse.shapes.serve import ServedPiece, ShapeTable
from fusion_advisor.records import SizeRange
from fusion_advisor.runtime.call_tensors import numbers_in, objects_in
from fusion_advisor.runtime.torch_internals import module_call
from fusion_advisor.workload.architecture import max_positions
from fusion_advisor.workload.generate import CannotGenerate, fixed_step, growing_steps
from fusion_advisor.workload.load import LoadedWorkload
from fusion_advisor.workload.pooled_generate import PooledGenerate
from fusion_advisor.workload.static_cache import cache_name, in_steps

PREFILL, DECODE = "prefill", "decode"
STATIC_DECODE = "static decode"
ROOM = "room"
"""Positions of a static cache."""
PADDED = "padded "
"""Ahead of the name of a step whose prompts are of different lengths: such a step has a mask."""
_USUAL_CACHE = 1024
"""Tokens in a cache, where a range of them is proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangedCall:
    """A way in which the model is called, and what may vary in it.

    Attributes:
        name: ``prefill``, ``decode``, ``padded prefill``, ``padded decode`` or ``static decode`` of ``generate``; empty for the
            example call.
        args: of one such call.
        kwargs: of the same.
        dims: names of its tensors' dims.
        ranges: of these names.
        refusal: why no size of it can be served.
    """

    name: str = ""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dims: Dims
    ranges: tuple[SizeRange, ...]
    refusal: str = ""

    def pieces(self, capture: Capture) -> list[Piece]:
        """Split its ranges into what one graph serves each.

        Args:
            capture: at some sizes.
        """
        return self.finder(capture).all()

    def finder(self, capture: Capture) -> PieceFinder:
        """Return what splits its ranges into such pieces, one after the other.

        Args:
            capture: at some sizes.
        """

        def refused(_: object) -> OpenCapture:
            raise OneSizeOnly(self.refusal)

        return PieceFinder(self.ranges, refused if self.refusal else capture)

    @property
    def may_record(self) -> bool:
        """Whether CUDA graphs may serve it: not where each call is given new tensors of a cache, at addresses that none knows."""
        return self.name == STATIC_DECODE or not self.name.endswith(DECODE)

    @property
    def may_pad(self) -> bool:
        """Whether sizes may be rounded up to share a CUDA graph: not where a call makes a cache, which tells how long it is."""
        return self.name in ("", STATIC_DECODE)

    @property
    def most_result_bytes(self) -> int | None:
        """Of results that a CUDA graph of it may hold; None: any.

        A prefill's are its cache, and each graph holds its own. Where they are larger the call is rarely bound by its launches:
        Qwen2.5-7B makes 57 KB of cache for a token, and from about 1,000 tokens on its kernels take longer than their launches.
        """
        return None if self.may_pad else 64 << 20

    def at(self, sizes: Sizes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call at other sizes; a static cache then is half full, and its attributes say what it holds."""
        args, kwargs = resized(self.args, self.kwargs, self.dims, sizes)
        if self.name == STATIC_DECODE:
            then = sizes_of(call_tensors(self.args, self.kwargs), self.dims)
            assert then is not None
            for owner in objects_in(kwargs):
                _resize(owner, then, sizes)
        return args, kwargs

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
            detail=f"the dims of generate's calls are found by themselves; {CACHED} goes with ranges as a text",
            help="write shapes='batch=1..16,seq=1..512,cached=1..512'",
        )
    in_place = module_call.set_compiled_call(loaded.model, None)  # a fused call would count these as calls that it refused
    try:
        if getattr(getattr(loaded.model, "config", None), "is_encoder_decoder", False):
            raise CannotGenerate("the model is an encoder-decoder")
        found: list[RangedCall] = []
        for prefix, is_padded in (("", False), (PADDED, True)):
            prefill, decode, later = growing_steps(loaded.model, loaded.kwargs, is_padded=is_padded)
            if all(call.kwargs.keys() != prefill.keys() for call in found):  # else its mask is passed with any prompts
                found += _steps(request.ranges, prefix, prefill, decode, _why_not(cache_name(loaded.model), decode, later))
    except CannotGenerate as error:
        raise UsageError(
            detail=f"`{CACHED}` is the number of tokens in the KV cache of `generate`, and {error}",
            help=f"leave {CACHED} out of --shapes",
        ) from error
    else:
        found += _static_decode(loaded, request.ranges)
    finally:
        module_call.set_compiled_call(loaded.model, in_place)
    return found


def table_of(call: RangedCall, served: Sequence[ServedPiece]) -> ShapeTable:
    """Return what finds the piece that serves a call.

    Args:
        call: that varies.
        served: its pieces.
    """
    return ShapeTable(
        call.ranges, call.dims, served, (call.args, call.kwargs), may_record=call.may_record,
        most_result_bytes=call.most_result_bytes,
    )  # fmt: skip


def generate_of(loaded: LoadedWorkload, calls: Sequence[RangedCall]) -> PooledGenerate | None:
    """Return what stands for the model's ``generate`` where its decode steps on static caches are served."""
    rooms = [one.most for call in calls if call.name == STATIC_DECODE for one in call.ranges if one.name == ROOM]
    return PooledGenerate(loaded.model, most_tokens=rooms[0]) if rooms else None


def generate_hint(model: torch.nn.Module, asked: ShapeRequest) -> str:
    """Say which ranges would serve the steps of ``generate``; empty where they are served, or the model makes no tokens.

    Args:
        model: whose ``generate`` is meant.
        asked: the ranges that it has.
    """
    config, generates = getattr(model, "config", None), getattr(model, "can_generate", None)
    is_served = any(one.name == CACHED for one in asked.ranges)
    if is_served or asked.dims or len(asked.ranges) >= MOST_NAMES or not callable(generates) or not generates():
        return ""
    if getattr(config, "is_encoder_decoder", False):
        return ""
    limit = None if config is None else max_positions(config)
    most = _USUAL_CACHE if limit is None else min(_USUAL_CACHE, limit - 1)
    return (
        f"generate runs the original ops: no range is of its KV cache. --shapes '{asked.text},{CACHED}=1..{most}' serves it too"
    )


def _static_decode(loaded: LoadedWorkload, asked: Sequence[SizeRange]) -> list[RangedCall]:
    """Return a decode step on a cache of fixed size, which CUDA graphs can serve; nothing where the model has no such cache."""
    try:
        kwargs = fixed_step(loaded.model, loaded.kwargs, model_id=loaded.record.model_id)
    except CannotGenerate:
        return []
    cached = next(one for one in asked if one.name == CACHED)
    batch = [one for one in asked if one.name == "batch"]
    names = {ROOM, *(one.name for one in batch)}
    dims = {}
    for path, tensor in call_tensors((), kwargs).items():
        usual = [""] * tensor.dim()
        if tensor.dim() >= 2:
            usual[0] = "batch"
        if tensor.dim() == 4 and (path.endswith((".keys", ".values")) or path.startswith("attention_mask")):
            usual[3 if path.startswith("attention_mask") else 2] = ROOM
        known = _known(names, tuple(usual))
        if any(known):
            dims[path] = known
    rooms = SizeRange(name=ROOM, least=2, most=in_steps(cached.most + 1))
    found = RangedCall(name=STATIC_DECODE, kwargs=kwargs, dims=dims, ranges=(*batch, rooms))
    return [found] if sizes_of(call_tensors((), kwargs), dims) is not None else []


def with_room(sizes: Sizes) -> Sizes:
    """Return sizes with those of a static cache that holds as many tokens and takes one more."""
    return {**sizes, ROOM: in_steps(sizes[CACHED] + 1)} if CACHED in sizes else sizes


def _resize(owner: Any, then: Sizes, sizes: Sizes) -> None:
    """Let a cache's layer say its new sizes."""
    for name, size in (("max_cache_len", ROOM), ("batch_size", "batch"), ("max_batch_size", "batch")):
        if name in vars(owner) and size in sizes and vars(owner)[name] == then[size]:
            setattr(owner, name, sizes[size])
    held = vars(owner).get("cumulative_length")
    if isinstance(held, torch.Tensor):
        held.fill_(sizes[ROOM] // 2)


def _steps(
    ranges: Sequence[SizeRange], prefix: str, prefill: Mapping[str, Any], decode: Mapping[str, Any], why_not: str
) -> Iterator[RangedCall]:
    for name, kwargs, usual, refusal in ((PREFILL, prefill, _in_prefill, ""), (DECODE, decode, _in_decode, why_not)):
        tensors = call_tensors((), kwargs)
        asked = {one.name for one in ranges}
        dims = {path: _known(asked, usual(path, tensor)) for path, tensor in tensors.items()}
        own = [one for one in ranges if any(base_of(dim) == one.name for names in dims.values() for dim in names)]
        if prefix:  # a prompt of one token has no room for padding
            own = [one if one.name == "batch" else replace(one, least=max(2, one.least)) for one in own]
        if own and all(one.least <= one.most for one in own):
            open_dims = {path: names for path, names in dims.items() if any(names)}
            yield RangedCall(name=prefix + name, kwargs=kwargs, dims=open_dims, ranges=tuple(own), refusal=refusal)


def _in_prefill(path: str, tensor: torch.Tensor) -> tuple[str, ...]:
    return ("batch", "seq") if tensor.dim() == 2 and ".layers." not in path else ("",) * tensor.dim()


def _in_decode(path: str, tensor: torch.Tensor) -> tuple[str, ...]:
    if tensor.dim() == 4 and path.endswith((".keys", ".values")):
        return ("batch", "", CACHED, "")
    if tensor.dim() == 2 and path.startswith("attention_mask"):
        return ("batch", f"{CACHED}+1")
    return ("batch", *[""] * (tensor.dim() - 1)) if tensor.dim() >= 2 else ("",) * tensor.dim()


def _why_not(cache: str, decode: Mapping[str, Any], later: Mapping[str, Any]) -> str:
    """Say why a decode step is another graph at each token; empty where one graph serves it."""
    now, then = (dict(numbers_in(cache, step[cache])) for step in (decode, later))
    counted = [name for name, number in now.items() if then.get(name) != number]
    if counted:  # dynamo takes it for a constant
        return f"the cache counts in Python (`{counted[0]}`), so that each token is another graph"
    before, after = (call_tensors((), {cache: step[cache]}) for step in (decode, later))
    grown = [path for path, tensor in before.items() if path in after and after[path].shape != tensor.shape]
    return "" if grown else "its cache does not grow"


def _known(asked: Collection[str], dims: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name if base_of(name) in asked else "" for name in dims)
