"""Objects among a call's arguments (a KV cache): what they hold, in plain values, and one made of that.

An exported package has a copy of this file: a call is served where its objects hold what the exported call's held. Tensors are
compared apart, by their paths: ``cache.layers.0.keys``.
"""

from __future__ import annotations

import importlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None))


class Unknown(TypeError):
    """A value that cannot be described; the message is its path and its class."""


def spec_of(path: str, value: Any) -> Any:
    """Describe a value.

    Args:
        path: of it.
        value: an object, a list, a tensor, a class, a dtype, a device or a plain value.

    Raises:
        Unknown: it holds something else, or itself.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return {"tensor": path}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return {type(value).__name__: [spec_of(f"{path}.{number}", item) for number, item in enumerate(value)]}
    if isinstance(value, type):
        return {"type": _name(value)}
    if path.count(".") > _DEEPEST or callable(value) or not hasattr(value, "__dict__"):
        raise Unknown(f"`{path}` is a {type(value).__name__}")
    return {"class": _name(type(value)), "holds": {name: spec_of(f"{path}.{name}", item) for name, item in vars(value).items()}}


_DEEPEST = 8
"""An object that holds itself ends there."""


def is_like(spec: Any, value: Any) -> bool:
    """Whether a value is as a spec says; tensors are not compared.

    Args:
        spec: of another value.
        value: any.
    """
    if not isinstance(spec, dict):
        return type(value) is type(spec) and bool(value == spec)
    if "tensor" in spec:
        return isinstance(value, torch.Tensor)
    if "class" in spec:
        if _name(type(value)) != spec["class"]:
            return False
        holds, own = spec["holds"], vars(value)
        return own.keys() == holds.keys() and all(is_like(item, own[name]) for name, item in holds.items())
    for kind in (list, tuple):
        if kind.__name__ in spec:
            items = spec[kind.__name__]
            return type(value) is kind and len(value) == len(items) and all(map(is_like, items, value))
    try:
        return bool(spec_of("", value) == spec)
    except Unknown:
        return False


def made_of(spec: Any, tensor: Callable[[str], torch.Tensor], device: torch.device) -> Any:
    """Make a value.

    Args:
        spec: of it.
        tensor: returns the tensor of a path.
        device: that takes the place of the described one.
    """
    if not isinstance(spec, dict):
        return spec
    (kind, content), *_ = spec.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "device":
        return device
    if kind == "dtype":
        return getattr(torch, content)
    if kind in ("list", "tuple"):
        items = [made_of(item, tensor, device) for item in content]
        return items if kind == "list" else tuple(items)
    home, _, name = content.rpartition(".")
    found = getattr(importlib.import_module(home), name)
    if kind == "type":
        return found
    value = found.__new__(found)
    vars(value).update({name: made_of(item, tensor, device) for name, item in spec["holds"].items()})
    return value


def objects_in(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, object) for a value and every object in it.

    Args:
        path: of the value.
        value: one that :func:`spec_of` describes.
    """
    if isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from objects_in(f"{path}.{number}", item)
    elif not isinstance(value, (torch.Tensor, type)) and hasattr(value, "__dict__"):
        yield path, value
        for name, item in vars(value).items():
            yield from objects_in(f"{path}.{name}", item)


def at(path: str, call: Mapping[str, Any]) -> Any:
    """Return what lies at a path of a call's arguments.

    Args:
        path: ``cache.layers.0.keys``.
        call: the arguments by name.

    Raises:
        LookupError, AttributeError: there is nothing.
    """
    name, *parts = path.split(".")
    found = call[name]
    for part in parts:
        found = found[int(part)] if isinstance(found, (list, tuple)) else getattr(found, part)
    return found


def tensors_in(spec: Any) -> Iterator[str]:
    """Yield the path of every tensor.

    Args:
        spec: of a value.
    """
    if isinstance(spec, dict):
        if "tensor" in spec:
            yield spec["tensor"]
        else:
            yield from tensors_in(list(spec.get("holds", {}).values()))
            yield from tensors_in(spec.get("list") or spec.get("tuple"))
    elif isinstance(spec, list):
        for item in spec:
            yield from tensors_in(item)


class Seen:
    """Objects of the last call that was found to be as the exported one: unchanged ones are not read again.

    A static cache of 28 layers holds 84 tensors in 29 objects. What they are is compared in loops that run in C. Nothing keeps an
    object of the caller's alive: what is noted goes with it.

    Attributes:
        tensors: of the objects, by path.
        storages: addresses of their memory.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self, _: object = None) -> None:
        """Drop what is noted."""
        self.tensors: dict[str, torch.Tensor] = {}
        self.storages: frozenset[int] = frozenset()
        self._roots: dict[str, weakref.ref[Any]] = {}
        self._dicts: list[dict[str, Any]] = []
        self._lists: list[list[Any]] = []
        self._values: list[Any] = []
        self._then: tuple[list[Any], ...] = ()
        self._found: list[torch.Tensor] = []
        self._layouts: tuple[list[Any], ...] = ()

    def note(self, call: Mapping[str, Any], names: Iterable[str], paths: Iterable[str]) -> None:
        """Note a call's objects.

        Args:
            call: arguments by name.
            names: of the objects.
            paths: of their tensors.
        """
        self.forget()
        try:
            self._roots = {name: weakref.ref(call[name], self.forget) for name in names}
        except TypeError:  # an object that cannot be referred to weakly is read at each call
            return
        found = [one for name in names for one in _containers(call[name])]
        self._dicts = [one for one in found if isinstance(one, dict)]
        self._lists = [one for one in found if isinstance(one, list)]
        self.tensors = {path: at(path, dict(call)) for path in paths}
        self._found = [*self.tensors.values()]
        self.storages = frozenset(one.untyped_storage().data_ptr() for one in self._found)
        self._values, self._then, self._layouts = [*self._held()], self._named(), self._laid_out()

    def holds_the_same(self, call: Mapping[str, Any]) -> bool:
        """Whether a call's objects are those that were noted, and hold the same objects in this order, or the first of them.

        So its tensors are those that were noted. That is all that is compared ahead of a launch which can be undone.

        Args:
            call: arguments by name.
        """
        if not self._roots:
            return False
        for name, root in self._roots.items():
            if root() is not call.get(name):
                return False
        return all(map(operator.is_, self._held(), self._values))

    def is_unchanged(self, call: Mapping[str, Any], *, holds_the_same: bool = False) -> bool:
        """Whether a call's objects are those that were noted, and hold the same.

        Args:
            call: arguments by name.
            holds_the_same: whether that was asked for this call.
        """
        is_same = holds_the_same or self.holds_the_same(call)
        return is_same and self._named() == self._then and self._laid_out() == self._layouts

    def _held(self) -> Iterator[Any]:
        """Yield what the objects hold."""
        return chain(chain.from_iterable(map(dict.values, self._dicts)), chain.from_iterable(self._lists))

    def _named(self) -> tuple[list[Any], ...]:
        """Return the names of what the objects hold, how much the lists hold, and all classes."""
        roots = [type(root()) for root in self._roots.values()]
        return [*chain.from_iterable(self._dicts)], [*map(len, self._lists)], [*roots, *map(type, self._held())]

    def _laid_out(self) -> tuple[list[Any], ...]:
        """Return addresses, sizes, strides and dtypes of the tensors, which can change in place."""
        kind, found = torch.Tensor, self._found
        return (
            [*map(kind.data_ptr, found)], [*map(kind.size, found)], [*map(kind.stride, found)], [*map(_DTYPE, found)]
        )  # fmt: skip


_DTYPE = operator.attrgetter("dtype")


def _containers(value: Any) -> Iterator[dict[str, Any] | list[Any]]:
    """Yield the dict of an object, lists in it, and those of all that it holds."""
    if isinstance(value, list | tuple):
        if isinstance(value, list):
            yield value
        for item in value:
            yield from _containers(item)
    elif not isinstance(value, (torch.Tensor, type)) and hasattr(value, "__dict__"):
        yield vars(value)
        for item in vars(value).values():
            yield from _containers(item)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
