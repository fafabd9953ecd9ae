"""How a replayed CUDA graph's results are handed out: what was found out once of its output serves every call.

An exported package has a copy of this file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Given(NamedTuple):
    """What a call's output is made of.

    Attributes:
        call: its arguments by name.
        copies: of what its graph wrote.
        late: results that were made behind it.
    """

    call: Mapping[str, Any]
    copies: Sequence[torch.Tensor]
    late: Sequence[torch.Tensor]


Make = Callable[[Given], Any]
"""Makes a part of an output."""


@dataclasses.dataclass(frozen=True, eq=False)
class Late:
    """Stands for a large result in a recorded call. The result is made after each replay, in memory of the caller's.

    Inside the graph it would be written to the graph's memory and copied out of it.
    """

    function: Callable[..., torch.Tensor]
    given: tuple[Any, ...]
    """What it is made of; tensors among it are the model's, or what the graph wrote."""

    @classmethod
    def of(cls, function: Callable[..., torch.Tensor], *given: Any) -> Late:
        """Note a call instead of making it."""
        return cls(function, given)


def at_once(function: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
    """Make a call that a CUDA graph would leave out."""
    return function(*given)


class Outlets:
    """Finds out once for a graph how each part of its output is made: a call of its own takes as little Python as can be.

    What is an argument, or a view of one, is the caller's own. Results that share memory share a copy.

    Attributes:
        memories: the graph's memory that is copied for the caller.
        late: results that are made behind the graph.
    """

    def __init__(self, own: Mapping[str, Any], statics: Mapping[str, torch.Tensor], kept: Collection[int], output: Any) -> None:
        """Find the memories.

        Args:
            own: the arguments that the graph was recorded with.
            statics: those that others are copied into.
            kept: addresses of memory that outlives the graph: the model's, and what the call's objects hold.
            output: of the recorded call.
        """
        self._given = {id(value): name for name, value in own.items() if not isinstance(value, _PLAIN)}
        self._statics = {storage_of(static): (name, static.storage_offset()) for name, static in statics.items()}
        self._kept = kept
        self.late: list[Late] = []
        self._sharing: dict[Any, list[torch.Tensor]] = {}
        _made(output, self._note)
        self._places = {key: place for place, key in enumerate(self._sharing)}
        spans = [*map(_span, self._sharing.values())]
        self.memories = tuple(memory for memory, _ in spans)
        self._starts = [start for _, start in spans]

    def maker(self, value: Any) -> Make:
        """Return what makes a value."""
        return _made(value, self._leaf)

    def _is_own(self, value: Any) -> bool:
        """Whether a value is a tensor in memory of the graph alone."""
        is_tensor = isinstance(value, torch.Tensor) and id(value) not in self._given
        return is_tensor and storage_of(value) not in (self._statics.keys() | self._kept)

    def _note(self, value: Any) -> Make:
        if isinstance(value, Late):
            if value not in self.late:
                self.late.append(value)
        elif self._is_own(value):
            self._sharing.setdefault(_memory(value), []).append(value)
        return _nothing

    def _leaf(self, value: Any) -> Make:
        if id(value) in self._given:
            name = self._given[id(value)]
            return lambda given: given.call[name]
        if isinstance(value, Late):
            number = self.late.index(value)
            return lambda given: given.late[number]
        if not isinstance(value, torch.Tensor) or (not self._is_own(value) and storage_of(value) not in self._statics):
            return lambda _: value
        size, stride = value.shape, value.stride()
        if not self._is_own(value):
            of, begin = self._statics[storage_of(value)]
            offset = value.storage_offset() - begin
            return lambda given: given.call[of].as_strided(size, stride, given.call[of].storage_offset() + offset)
        place = self._places[_memory(value)]
        start = self._starts[place]
        if start is None:
            return lambda given: given.copies[place]
        offset = value.storage_offset() - start
        return lambda given: given.copies[place].as_strided(size, stride, offset)


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory.

    Args:
        tensor: any with numbers.
    """
    return tensor.untyped_storage().data_ptr()


def _memory(tensor: torch.Tensor) -> Any:
    """Return a key of the memory that a tensor shares with others; an empty one shares none."""
    return (storage_of(tensor), tensor.dtype) if tensor.numel() else id(tensor)


def _span(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, int | None]:
    """Return all that tensors of one memory span, and its first element; the tensor itself and None where there is just one."""
    only = tensors[0]
    if all(one is only for one in tensors) and _extent(only) == only.numel():
        return only, None
    start = min(int(one.storage_offset()) for one in tensors)
    end = max(int(one.storage_offset()) + _extent(one) for one in tensors)
    return only.as_strided((end - start,), (1,), start), start


def _extent(tensor: torch.Tensor) -> int:
    """Return how many elements lie between a tensor's first and its last, both among them."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0


_PLAIN = (bool, int, float, str, type(None))


def _nothing(given: Given) -> None:
    """Make nothing."""


def _made(value: Any, leaf: Callable[[Any], Make]) -> Make:
    """Return what makes an output of its leaves."""
    kind = type(value)
    if kind in (list, tuple):
        items = [_made(item, leaf) for item in value]
        return lambda given: kind([make(given) for make in items])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [_made(item, leaf) for item in value]
        return lambda given: kind(*[make(given) for make in items])
    if kind is dict:
        pairs = [(name, _made(item, leaf)) for name, item in value.items()]
        return lambda given: {name: make(given) for name, make in pairs}
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Late)):
        names = [one.name for one in dataclasses.fields(value) if one.init and getattr(value, one.name) is not None]
        fields = [(name, _made(getattr(value, name), leaf)) for name in names]
        return lambda given: kind(**{name: make(given) for name, make in fields})
    return leaf(value)
