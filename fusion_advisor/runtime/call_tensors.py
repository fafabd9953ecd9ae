"""Finds all tensors among a call's arguments, including tensors inside objects (a KV cache).

A cache is an object whose attributes are tensors (keys, values, how many tokens it holds) and plain values (its length, whether
its window is full). Modules and functions are not looked into.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for every tensor in a value: ``cache.layers.0.keys``."""
    yield from ((found, item) for found, _, item in _walk(name, value, ()) if isinstance(item, torch.Tensor))


def numbers_in(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield (name, number) for every Python number in a value: ``cache.layers.0.cumulative_length``."""
    yield from ((found, item) for found, _, item in _walk(name, value, ()) if type(item) in (int, float))


def objects_in(value: Any) -> Iterator[Any]:
    """Yield every object in a value whose attributes are part of the call, the outer ones first."""
    seen: dict[int, Any] = {}
    for _, owner, _ in _walk("", value, ()):
        if owner is not None and id(owner) not in seen:
            seen[id(owner)] = owner
            yield owner


def copied(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a value, its objects copied too, with every tensor and plain value replaced by ``change`` of it."""
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(copied(item, change) for item in value)
    if isinstance(value, dict):
        return type(value)((key, copied(item, change)) for key, item in value.items())
    if is_object(value):
        twin = copy.copy(value)
        for attribute, item in vars(value).items():
            setattr(twin, attribute, value if item is value else copied(item, change))
        return twin
    return copy.deepcopy(value)


def without_numbers(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Name the first tensor of a call whose numbers cannot be compared, and say why; empty where all can.

    Args:
        model: its parameters and buffers are looked at.
        args: positional arguments, looked into.
        kwargs: keyword arguments, looked into.
    """
    given = (found for name, value in (("args", args), *kwargs.items()) for found in tensors_in(name, value))
    named = chain(model.named_parameters(), model.named_buffers(), given)
    return next((f"`{name}` {lack}" for name, tensor in named if (lack := what_it_lacks(tensor))), "")


def what_it_lacks(tensor: torch.Tensor) -> str:
    """Say why a tensor's numbers can be neither copied nor compared element by element; empty for a dense tensor with numbers.

    Args:
        tensor: of any layout, shape and dtype.
    """
    if torch.nn.parameter.is_lazy(tensor):
        return "is not initialised yet: call the model once, so that its lazy modules get their sizes"
    if tensor.is_nested:
        return "is a nested tensor, whose rows have sizes of their own"
    if tensor.layout != torch.strided:
        return f"is sparse ({str(tensor.layout).removeprefix('torch.')}), and only dense tensors are fused and compared"
    if tensor.is_meta:
        return "lies on the device `meta`, where a tensor has no numbers"
    return ""


def is_object(value: Any) -> bool:
    """Whether a value is an object to look into: no module, function or plain value."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, torch.nn.Module)


def _walk(name: str, value: Any, above: tuple[int, ...]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, None, leaf) for every leaf and (name, object, None) for every object; one that holds itself ends there."""
    if id(value) in above:
        return
    inside = (*above, id(value))
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(f"{name}.{key}", item, inside)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _walk(f"{name}.{index}", item, inside)
    elif isinstance(value, (torch.Tensor, *_PLAIN)):
        yield name, None, value
    elif is_object(value):
        yield name, value, None
        for attribute, item in vars(value).items():
            yield from _walk(f"{name}.{attribute}", item, inside)
