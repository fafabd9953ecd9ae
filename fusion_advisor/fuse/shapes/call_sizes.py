"""Which dims of a call's tensors a name stands for, and the same call at other sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusion_advisor.capture.sizes.open_capture import Dims, Sizes, call_tensors, dim_size
from fusion_advisor.errors import UsageError
from fusion_advisor.fuse.plan.size_ranges import KNOWN, ShapeRequest
from fusion_advisor.runtime.call_tensors import copied

_HIDDEN = ("inputs_embeds", "hidden_states", "encoder_hidden_states")
_FEATURES = ("input_features",)


def dims_of(args: Sequence[Any], kwargs: Mapping[str, Any], request: ShapeRequest) -> dict[str, tuple[str, ...]]:
    """Say which dims of a call's tensors may vary.

    Integer tensors are (batch, seq), images (batch, channels, height, width), hidden states (batch, seq, width), audio features
    (batch, bins, frames), other floats (batch, …).

    Args:
        args: of the example call.
        kwargs: of the same.
        request: the ranges, and the names of dims where the user gave them.

    Raises:
        UsageError: a name is no dim of any tensor, or a tensor that is named is none of the call's.
    """
    tensors = call_tensors(args, kwargs)
    asked = {one.name for one in request.ranges}
    given = dict(request.dims)
    for path, names in given.items():
        if path not in tensors:
            raise UsageError(detail=f"the call has no tensor `{path}`", help=f"it has {', '.join(tensors) or 'none'}")
        if len(names) != tensors[path].dim():
            detail = f"`{path}` has {tensors[path].dim()} dims, and {len(names)} are named"
            raise UsageError(detail=detail, help="name each dim, None where it does not vary")
    found = {}
    for path, tensor in tensors.items():
        names = given.get(path, () if given else _usual(path, tensor))
        if asked.intersection(names):
            found[path] = tuple(name if name in asked else "" for name in names)
    missing = sorted(asked - {name for names in found.values() for name in names})
    if missing:
        known = "" if set(missing) <= set(KNOWN) else f"; names that are found by themselves are {', '.join(KNOWN)}"
        detail = f"no tensor of the call has a dim {', '.join(missing)}{known}"
        path = next(iter(tensors), "x")
        named = f"{{{path!r}: ('{missing[0]}=1..16', None)}}"
        raise UsageError(detail=detail, help=f"fa.apply(..., shapes={named}) names each dim of a tensor; None does not vary")
    return found


def _usual(path: str, tensor: torch.Tensor) -> tuple[str, ...]:
    name, rank = path.rpartition(".")[2], tensor.dim()
    if not tensor.is_floating_point():
        return ("batch", "seq", *[""] * (rank - 2)) if rank >= 2 else ()
    if rank == 4:
        return ("batch", "", "height", "width")
    if rank == 3 and name in _HIDDEN:
        return ("batch", "seq", "")
    if rank == 3 and name in _FEATURES:
        return ("batch", "", "frames")
    return ("batch", *[""] * (rank - 1)) if rank >= 2 else ()


def resized(args: Sequence[Any], kwargs: Mapping[str, Any], dims: Dims, sizes: Sizes) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call at other sizes: values are repeated along a dim that grows and cut off along one that shrinks.

    Args:
        args: of the example call.
        kwargs: of the same.
        dims: names of its tensors' dims.
        sizes: of all names.
    """
    paths = {id(tensor): path for path, tensor in call_tensors(args, kwargs).items()}

    def at_size(leaf: Any) -> Any:
        names = dims.get(paths.get(id(leaf), "")) if isinstance(leaf, torch.Tensor) else None
        if names is None:
            return leaf
        for dim, name in enumerate(names):
            if name:
                size = dim_size(name, sizes)
                times = -(-size // max(leaf.shape[dim], 1))
                leaf = leaf.repeat_interleave(1, dim=dim) if times == 1 else torch.cat([leaf] * times, dim=dim)
                leaf = leaf.narrow(dim, 0, size)
        return leaf.clone(memory_format=torch.contiguous_format)  # a dim of size 1 keeps no stride of what it was cut from

    new_args, new_kwargs = copied((tuple(args), dict(kwargs)), at_size)
    return new_args, new_kwargs
