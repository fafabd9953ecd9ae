"""What a call is given, down to the tensors that an object (a KV cache) carries: their names, and what makes two calls alike.

A cache is an object whose attributes are tensors (keys, values, how many tokens it holds) and plain values (its length, whether
its window is full). Both are part of the call: the tensors by their layout, the plain values as they are, so that a count kept
in Python tells two calls apart and a count kept in a tensor does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what must be equal for two calls to be alike: names, classes, plain values, and the tensors' layouts.

    What cannot be looked into (a function, a module, an object without attributes) equals nothing but itself.
    """
    return (_key(args, ()), _key(dict(sorted(kwargs.items())), ()))


def tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for every tensor in a value: ``past_key_values.layers.0.keys``."""
    yield from ((found, item) for found, _, _, item in _walk(name, value, ()) if isinstance(item, torch.Tensor))


def plain_attributes(value: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield (object, attribute, value) for every plain value that an object in ``value`` carries."""
    for _, owner, attribute, item in _walk("", value, ()):
        if owner is not None and isinstance(item, _PLAIN):
            yield owner, attribute, item


def _is_open(value: Any) -> bool:
    """Whether a value is an object to look into."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, torch.nn.Module)


def _walk(name: str, value: Any, above: tuple[int, ...]) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield (name, owning object or None, attribute, leaf); an object that holds itself is not followed."""
    if id(value) in above:
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(f"{name}.{key}", item, (*above, id(value)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _walk(f"{name}.{index}", item, (*above, id(value)))
    elif isinstance(value, (torch.Tensor, *_PLAIN)):
        yield name, None, "", value
    elif _is_open(value):
        for attribute, item in vars(value).items():
            if isinstance(item, _PLAIN):
                yield f"{name}.{attribute}", value, attribute, item
            else:
                yield from _walk(f"{name}.{attribute}", item, (*above, id(value)))


def _key(value: Any, above: tuple[int, ...]) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, value.device, value.stride())
    if isinstance(value, _PLAIN):
        return value
    if id(value) in above:
        return object()
    inside = (*above, id(value))
    if isinstance(value, list | tuple):
        return (type(value), *(_key(item, inside) for item in value))
    if isinstance(value, Mapping):
        return (type(value), *((key, _key(item, inside)) for key, item in value.items()))
    if _is_open(value):
        return (type(value), *((name, _key(item, inside)) for name, item in vars(value).items()))
    return object()
