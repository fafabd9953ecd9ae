"""The tensors and objects of a call, by names that mean the same in another process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fusion_advisor.fuse.start.described import CannotDescribe
from fusion_advisor.runtime.call_tensors import is_object, tensors_in


@dataclass(slots=True)
class Given:
    """What a call passes.

    Attributes:
        leaves: tensors that are passed as such, in the order of the call's signature.
        inside: tensors that objects hold (a KV cache): ``cache.layers.0.keys``.
        objects: that are passed as such.
    """

    leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    inside: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, those in objects last."""
        return [*self.leaves.values(), *self.inside.values()]


def given_by(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
    """Look through a call.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.

    Raises:
        CannotDescribe: it passes something that cannot be looked into, or an object inside a container.
    """
    found = Given()
    for name, value in arguments(args, kwargs).items():
        if is_object(value) and not isinstance(value, torch.Tensor | Mapping | list | tuple):
            found.objects[name] = value
            found.inside.update(tensors_in(name, value))
        else:
            found.leaves.update(_leaves(name, value))
    return found


def arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by place or name, in the order of its signature."""
    return {**{f"{place}": value for place, value in enumerate(args)}, **{name: kwargs[name] for name in sorted(kwargs)}}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif type(value) in (tuple, list):
        for place, item in enumerate(value):
            yield from _leaves(f"{name}.{place}", item)
    elif type(value) is dict:
        for key, item in value.items():
            yield from _leaves(f"{name}.{key!r}", item)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise CannotDescribe(f"the call passes a {type(value).__name__}")


def sharing(tensors: list[torch.Tensor]) -> list[int]:
    """Return for each tensor the place of the first that lies in the same memory."""
    places = [one.untyped_storage().data_ptr() if one.numel() else -1 - place for place, one in enumerate(tensors)]
    first: dict[int, int] = {}
    return [first.setdefault(where, place) for place, where in enumerate(places)]
