"""What one call of a model leaves changed (a KV cache, a running count, a buffer), and how to put it back.

A step that is measured, traced or checked runs hundreds of times, and each run must be the same work: a decode step that moves
its cache on by one token would soon write past its end. So one call is watched: every tensor among its arguments and the model's
buffers, and every attribute of the objects among its arguments, is compared with a copy from before. What a second call would
write again just the same (keys and values at one position) may stay; what moves on (the position itself) is put back before every
repeat. Which of both it is gets tried, not guessed. The cost while it is measured: one copy of what the call writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fusion_advisor.capture import torch_internals
from fusion_advisor.capture.arguments import objects_in, tensors_in
from fusion_advisor.errors import NotRepeatable

_SMALL_BYTES = 1024
"""A count or a position, not contents."""
_ABSENT = object()


@dataclass(slots=True, kw_only=True)
class Written:
    """What a call changes outside its result.

    Attributes:
        tensors: every tensor written to, by name, live.
        before: their values before the call.
        made: names of the tensors that the call puts in place of others (a cache that allocates itself at its first use).
        moving: names of the tensors that must be put back before the call is repeated.
        attributes: (object, attribute, value before the call) for every attribute that the call sets to something else.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    made: tuple[str, ...] = ()
    moving: tuple[str, ...] = ()
    attributes: list[tuple[Any, str, Any]] = field(default_factory=list)

    def rewind(self) -> None:
        """Put back what moves on, so that the next call does the same work again."""
        self._put_back(self.moving)

    def restore(self) -> None:
        """Put everything back as it was before the first call."""
        self._put_back(tuple(self.tensors))

    def _put_back(self, names: tuple[str, ...]) -> None:
        for owner, name, value in self.attributes:
            if value is _ABSENT:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, value)
        if names:
            torch_internals.copy_all([self.tensors[name] for name in names], [self.before[name] for name in names])


def written_by(
    call: Callable[[], object],
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    model_id: str = "model",
) -> Written:
    """Watch one call, and another if it writes anything.

    Args:
        call: the model on these arguments.
        model: its buffers are watched.
        args: positional arguments, looked into.
        kwargs: keyword arguments, looked into.
        model_id: for the error message only.

    Returns:
        What it writes; the state is as before the call, as far as a repeated call can tell.

    Raises:
        NotRepeatable: after everything was put back a second call is another one than the first (a list that grows, say).
    """
    found = {**arguments(args, kwargs), **dict(model.named_buffers())}
    copies = {name: tensor.detach().clone() for name, tensor in found.items()}
    attributes = [(owner, dict(vars(owner))) for owner in objects_in((args, dict(kwargs)))]
    layouts = _layouts(args, kwargs)
    call()
    written = Written(attributes=[change for owner, earlier in attributes for change in _changes(owner, earlier)])
    written.tensors = {name: tensor for name, tensor in found.items() if not torch.equal(tensor, copies[name])}
    now = arguments(args, kwargs)
    written.made = tuple(name for name, tensor in now.items() if tensor is not found.get(name))
    written.before = {name: copies[name] for name in written.tensors}
    del copies
    if not written.tensors and not written.attributes and _layouts(args, kwargs) == layouts:
        return written
    after = {name: tensor.detach().clone() for name, tensor in written.tensors.items()}
    small = tuple(name for name, tensor in written.tensors.items() if tensor.nbytes <= _SMALL_BYTES)
    for moving in (small, tuple(written.tensors)):
        written.moving = moving
        written.rewind()
        if _layouts(args, kwargs) != layouts:
            raise NotRepeatable(model_id=model_id)
        call()
        if all(torch.equal(tensor, after[name]) for name, tensor in written.tensors.items()):
            break
    written.rewind()
    return written


def arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return every tensor among the arguments by name, as it is now."""
    named = [("args", args), *kwargs.items()]
    return {name: tensor for key, value in named for name, tensor in tensors_in(key, value)}


def _layouts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in arguments(args, kwargs).items()}


def _changes(owner: Any, earlier: Mapping[str, Any]) -> list[tuple[Any, str, Any]]:
    now = vars(owner)
    names = dict.fromkeys((*earlier, *now))
    return [
        (owner, name, earlier.get(name, _ABSENT)) for name in names if earlier.get(name, _ABSENT) is not now.get(name, _ABSENT)
    ]
