"""Signature of a call: names, layouts, plain values, and the contents of the objects that it passes."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, compress
from typing import Any

import torch

from fusion_advisor.fuse.direct.words import Words, dict_place, words_are_readable
from fusion_advisor.fuse.shapes.call_form import CallParts, Layout

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_AS_THEY_ARE = {bool, int, str, bytes, type(None)}
"""Plain classes of which equal values are the same."""
_COMPARED = (slice, range, type(Ellipsis), Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)
_REFERS_TO_NOTHING = {*_PLAIN, torch.Tensor, torch.dtype, torch.device}
"""Classes of which no object holds a method of another object."""
_DEEPEST = 5


def signature(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    leaves: list[torch.Tensor] | None = None,
    objects: dict[int, Seen] | None = None,
    passed: list[Seen] | None = None,
) -> tuple[Any, ...]:
    """Return what must be equal for a call to be one that was verified.

    Args:
        args: of the call.
        kwargs: of the call; their order does not matter.
        leaves: gets the tensors that are passed as such, not those that objects hold.
        objects: what is remembered of objects seen before: a KV cache of 28 layers takes longer to read than the rest of the
            call, so it is read again only when an attribute or a length in it has changed.
        passed: gets what is remembered of each object of the call: another one as soon as the object was read again.
    """
    reader = _Reader([] if leaves is None else leaves, {} if objects is None else objects, [] if passed is None else passed)
    key = reader.key
    # A comprehension: at each call a generator takes 1 µs more.
    return (*map(key, args), *[(name, key(kwargs[name])) for name in sorted(kwargs)])


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return what a verified call knows of a tensor: its shape, dtype, device and strides.

    A tensor that is negated or conjugated only when an op reads it has two marks more: a kernel reads the memory as it lies. One
    without strides has a mark that equals nothing.
    """
    if tensor.is_neg() or tensor.is_conj():
        return (tensor.shape, tensor.dtype, tensor.device, tensor.stride(), tensor.is_neg(), tensor.is_conj())
    try:
        return (tensor.shape, tensor.dtype, tensor.device, tensor.stride())
    except RuntimeError:  # to ask each tensor first would take longer than all else that is read of it
        return (torch.Size(()), tensor.dtype, tensor.device, (), Opaque(tensor))


def has_no_strides(layout: Layout) -> bool:
    """Whether a layout is of a nested or of a compressed sparse tensor, which no call is verified with."""
    return isinstance(layout[-1], Opaque)


class ObjectKey:
    """Contents of an object, hashed once and compared once: either takes 12 µs for a KV cache of 28 layers (600 parts).

    Args:
        form: all that it holds but the layouts of its tensors.
        layouts: of these.
    """

    __slots__ = ("_hash", "form", "parts")

    def __init__(self, form: Form, layouts: tuple[Layout, ...]) -> None:
        self.form, self.parts = form, (form, layouts)
        self._hash = hash((form, len(layouts), layouts[:1]))  # the layers of a cache are alike

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Of all tensors inside, in the order in which their holders are read."""
        return self.parts[1]

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ObjectKey) or self._hash != other._hash:
            return False
        if self.parts is not other.parts and self.parts == other.parts:
            self.parts = other.parts  # compared once
        return self.parts is other.parts


class Opaque:
    """Stands for a value that two calls cannot be compared by (a NumPy array, a generator): equal to nothing but itself.

    Args:
        value: what it stands for.
    """

    __slots__ = ("kind",)

    def __init__(self, value: Any) -> None:
        self.kind = type(value)


class Form:
    """What an object holds, with a mark in place of each tensor: hashed once, and compared once with that of another object."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: Any) -> None:
        self.parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Form) or self._hash != other._hash:
            return False
        if self.parts is not other.parts and self.parts == other.parts:
            self.parts = other.parts
        return self.parts is other.parts


@dataclass(slots=True, weakref_slot=True)
class Seen:
    """An object that was read: what its key was made of, to see cheaply whether it still holds the same.

    Attributes:
        value: a weak reference to it.
        key: its contents then.
        holders: the attributes of each object inside, and the items of each list, as they are now.
        lengths: of the holders, when they were read.
        contents: of the holders then, one after the other.
        refers_to_itself: something inside refers to the object: remembered, it would never be freed.
        tables: the dicts among the holders; None for another one that can change and is no list.
        lists: the lists among the holders, with the items of each then.
        words: the versions of the dicts, once the object was passed again; None compares all contents.
        followed: what callers note to compare the object in bulk, each by a token of its own.
        is_whole: no object inside lies so deep that it was not read.
        kept: what callers note of the objects inside, by tokens: what is remembered next has it too while nothing but tensors in
            them was replaced.
    """

    value: Callable[[], Any]
    key: ObjectKey | None = None
    holders: list[Collection[Any]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    contents: list[Any] = field(default_factory=list)
    refers_to_itself: bool = False
    tables: list[dict[Any, Any] | None] = field(default_factory=list)
    lists: list[tuple[list[Any], tuple[Any, ...]]] = field(default_factory=list)
    words: Words | None = None
    followed: dict[object, Any] = field(default_factory=dict)
    is_whole: bool = True
    kept: dict[object, Any] = field(default_factory=dict)

    def note(self, holder: Collection[Any], table: Any = None) -> None:
        """Remember what a part of the object holds.

        Args:
            holder: the values of a dict, a list or a tuple.
            table: the dict.
        """
        if type(holder) is list:
            self.lists.append((holder, tuple(holder)))
        elif type(holder) is not tuple:
            self.tables.append(table if type(table) is dict else None)
        root = self.value()
        # Asking a tensor for an attribute that it lacks takes longer than all the rest of it.
        others = [item for item in holder if type(item) not in _REFERS_TO_NOTHING]
        self.refers_to_itself |= any(item is root or getattr(item, "__self__", None) is root for item in others)
        self.holders.append(holder)
        self.lengths.append(len(holder))
        self.contents += holder

    def with_other_tensors(self, value: Any) -> Seen | None:
        """Return what there is to remember of the object now, where nothing but tensors in it were replaced by tensors.

        A cache that grows has new keys and values at each step. With 12 layers all of it takes 100 µs to read, this 30 µs.
        """
        if self.value() is not value or list(map(len, self.holders)) != self.lengths:
            return None
        now = list(chain.from_iterable(self.holders))
        others = list(compress(now, map(operator.is_not, now, self.contents)))
        before = list(compress(self.contents, map(operator.is_not, now, self.contents)))
        if self.key is None or any(type(one) is not torch.Tensor for one in chain(others, before)):
            return None
        key = ObjectKey(self.key.form, layouts_in(now))
        lists = [(holder, tuple(holder)) for holder, _ in self.lists]
        kept = self.kept if self.is_whole else {}
        return Seen(
            self.value, key, self.holders, self.lengths, now, tables=self.tables, lists=lists, is_whole=self.is_whole, kept=kept
        )  # fmt: skip

    def is_same(self, value: Any) -> bool:
        """Whether it is that object and all that it holds is what was read.

        Versions of dicts and items of lists say so at once: a call with 28 layers of a cache takes 10 µs in place of 20.
        """
        if self.value() is not value:
            return False
        if self.words is not None:
            if self.words.are_same():
                return all(len(now) == len(then) and all(map(operator.is_, now, then)) for now, then in self.lists)
            self.words.read()  # ahead of the comparison: what another thread changes meanwhile is found by the next call
        if not self._holds_what_it_held():
            return False
        if self.words is None:
            words = self._versions()
            if words is not None and self._holds_what_it_held():  # once more: they were read after the comparison
                self.words = words
        return True

    def _holds_what_it_held(self) -> bool:
        same_lengths = list(map(len, self.holders)) == self.lengths
        return same_lengths and all(map(operator.is_, chain.from_iterable(self.holders), self.contents))

    def _versions(self) -> Words | None:
        """Return the versions of all dicts inside; None where a holder has none, or where versions cannot be read."""
        tables = [table for table in self.tables if table is not None]
        if not words_are_readable() or len(tables) != len(self.tables):
            return None
        return Words(map(dict_place, tables), tables)


def _exact(value: Any) -> Any:
    """Return a key that differs for plain values that are equal and not the same, and is the same for each NaN.

    0.0 and -0.0 are equal, and a NaN equals nothing: a float's key is its bits, and every NaN has one key.
    """
    if isinstance(value, float):
        return float.hex(value)  # of a NaN it is "nan"
    if isinstance(value, complex):
        return (_exact(value.real), _exact(value.imag))
    return value


def _compared(value: Any) -> Any:
    """Return the key of a value that holds no attributes and never changes."""
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return (slice, *((type(part), _exact(part)) if isinstance(part, _PLAIN) else object() for part in parts))
    return (type(value), value)


def _named(name: Any) -> Any:
    """The key of a dict: 1, 1.0 and True are one for Python, and models that look at its type do different things."""
    return name if type(name) is str else (type(name), _exact(name)) if isinstance(name, _PLAIN) else str(name)


class _Reader:
    """Turns values into hashable keys."""

    def __init__(self, leaves: list[torch.Tensor], objects: dict[int, Seen], passed: list[Seen]) -> None:
        self.leaves = leaves
        self.objects = objects
        self.passed = passed

    def key(self, value: Any) -> Any:
        if type(value) in _AS_THEY_ARE:
            return (type(value), value)
        if isinstance(value, torch.Tensor):
            self.leaves.append(value)
            return layout_of(value)
        if isinstance(value, _PLAIN):
            return (type(value), _exact(value))  # 1, 1.0 and True are equal and mean different graphs
        if type(value) in (tuple, list):
            return (type(value), *map(self.key, value))
        if isinstance(value, _COMPARED):
            return _compared(value)
        if type(value) is dict:
            return (dict, *((_named(name), self.key(item)) for name, item in value.items()))
        seen = self.objects.get(id(value))
        if seen is not None and not seen.is_same(value):
            seen = seen.with_other_tensors(value)
            if seen is not None:
                self.objects[id(value)] = seen
        if seen is not None:
            self.passed.append(seen)
            return seen.key
        objects, number = self.objects, id(value)
        try:
            seen = Seen(weakref.ref(value, lambda _: objects.pop(number, None)))
            may_last = True
        except TypeError:  # cannot be referred to weakly
            seen, may_last = Seen(_nobody), False
        form = Form(_state(value, 0, seen))
        key = ObjectKey(form, layouts_in(seen.contents))
        if not may_last or seen.refers_to_itself:  # read each time
            self.passed.append(Seen(_nobody))
            return key
        seen.key = key
        objects[number] = seen
        self.passed.append(seen)
        return key


def layouts_in(contents: Iterable[Any]) -> tuple[Layout, ...]:
    """Return the layouts of the tensors among some values; equal ones in a row are one object."""
    found: list[Layout] = []
    last = None
    for item in contents:
        if isinstance(item, torch.Tensor):
            layout = layout_of(item)
            if layout != last:
                last = layout
            found.append(last)
    return tuple(found)


def _state(value: Any, depth: int, seen: Seen) -> Any:
    """Return what an object holds; an :class:`Opaque` stands for what is not plain data, tensors, or objects of those.

    Each tensor is one mark: the layouts are read off what ``seen`` notes.
    """
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    if isinstance(value, (*_PLAIN, type, torch.dtype, torch.device)):
        return (type(value), _exact(value))
    if isinstance(value, _COMPARED):
        return _compared(value)
    if depth > _DEEPEST:
        seen.is_whole = False
        return Opaque(value)
    if isinstance(value, tuple | list):
        seen.note(value)
        return (type(value), *(_state(item, depth + 1, seen) for item in value))
    contents = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if contents is None:
        return Opaque(value)
    seen.note(contents.values(), contents)
    return (type(value), *((_named(name), _state(item, depth + 1, seen)) for name, item in contents.items()))


def _nobody() -> None:
    """Stand for a reference to what can have none."""


def parts_of(key: Any, leaves: list[torch.Tensor], objects: Sequence[Seen]) -> CallParts:
    """Return a call's signature in two parts: the layouts of its tensors, and all the rest.

    Args:
        key: the signature.
        leaves: tensors that the call passes as such.
        objects: what is remembered of the objects that it passes.
    """
    plain: list[Layout] = []
    inside: list[Layout] = []

    def form(part: Any) -> Any:
        if isinstance(part, ObjectKey):
            inside.extend(part.layouts)
            return part.form
        if not isinstance(part, tuple):
            return part
        if part and isinstance(part[0], torch.Size):  # the layout of a tensor
            plain.append(part)
            return torch.Tensor
        return tuple(map(form, part))

    found = tuple(map(form, key))

    def tensors() -> list[torch.Tensor]:
        return [*leaves, *(item for one in objects for item in one.contents if isinstance(item, torch.Tensor))]

    return CallParts(found, (*plain, *inside), tensors)


def holds_object(key: Any) -> bool:
    """Whether a call with this signature passed an object that is no plain data."""
    return isinstance(key, tuple) and any(isinstance(part, ObjectKey) or holds_object(part) for part in key)


def sharing(leaves: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return, for each tensor of a call, the place of the first that lies in the same memory."""
    if len(leaves) < 2:
        return (0,) * len(leaves)
    places = [leaf.untyped_storage().data_ptr() if leaf.numel() else -1 - place for place, leaf in enumerate(leaves)]
    return tuple(map(places.index, places))


def device_of(leaves: Sequence[torch.Tensor]) -> int:
    """Return the number of the GPU that a call's tensors lie on; -1 for a CPU."""
    for leaf in leaves:
        if leaf.is_cuda:
            return leaf.get_device()
    return -1
