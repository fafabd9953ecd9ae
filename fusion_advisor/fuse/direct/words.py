"""Compares in one pass the words of memory in which Python notes that an object was changed.

A check of a model in Python takes 0.1 µs for each dict or attribute that it looks at, and a model of 12 layers has 800. CPython
keeps one word for each: a dict has a version that no other dict ever had and that every write changes, an object has pointers to
its class and to its ``__dict__``, a function has pointers to its code and defaults. A compiled loop compares 800 of these words
in 1 µs.

What is known of CPython's memory holds for 3.11 and 3.12 on 64 bits, and is tried out on objects of ours before anything relies
on it. On another Python, or without a C++ compiler, :func:`words_are_readable` is false, and the checks run in Python.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import struct
import sys
from array import array
from collections.abc import Iterable
from types import CellType, FunctionType, MappingProxyType
from typing import Any

from fusion_advisor.codegen.common.interface import KernelBuildFailed
from fusion_advisor.codegen.cpp.small_library import small_library

_SOURCE = """#include <cstdint>

// Whether each word still holds what it held.
extern "C" int fa_are_same(const uint64_t *const *places, const uint64_t *before, int64_t count) {
  uint64_t differing = 0;
  for (int64_t i = 0; i < count; ++i) differing |= *places[i] ^ before[i];
  return differing == 0;
}

extern "C" int fa_read(const uint64_t *const *places, uint64_t *now, int64_t count) {
  for (int64_t i = 0; i < count; ++i) now[i] = *places[i];
  return 1;
}
"""
_WORD = 8
_CLASS = 1 * _WORD
_DICT_VERSION = 3 * _WORD
_CELL_CONTENTS = 2 * _WORD
_MANAGED_DICT = -3 * _WORD
_HAS_MANAGED_DICT = 1 << 4
"""``Py_TPFLAGS_MANAGED_DICT``: the pointer to the ``__dict__`` lies ahead of the object."""
_CANNOT_CHANGE = 1 << 8
"""``Py_TPFLAGS_IMMUTABLETYPE``: no attribute of the class can be set."""
_OF_FUNCTIONS = ("__code__", "__closure__", "__defaults__", "__kwdefaults__", "__name__")


class Words:
    """Words of memory, and what they held when they were last read.

    Args:
        places: the addresses.
        owners: the objects that they lie in, which live as long as these words do.
    """

    def __init__(self, places: Iterable[int], owners: Iterable[Any]) -> None:
        self._owners = list(owners)
        self._places = array("Q", dict.fromkeys(places))
        self._before = array("Q", bytes(len(self._places) * _WORD))
        are_same, read = _functions()
        at, to = (ctypes.c_void_p(values.buffer_info()[0]) for values in (self._places, self._before))
        count = ctypes.c_int64(len(self._places))
        self._are_same = functools.partial(are_same, at, to, count)
        self._read = functools.partial(read, at, to, count)
        self._read()

    def __len__(self) -> int:
        return len(self._places)

    def are_same(self) -> bool:
        """Whether each word holds what it held."""
        return bool(self._are_same())

    def read(self) -> None:
        """Take the words as they are now."""
        self._read()


@functools.cache
def words_are_readable() -> bool:
    """Whether this Python keeps its objects as this module expects, and the loop could be compiled."""
    if sys.implementation.name != "cpython" or not (3, 11) <= sys.version_info[:2] <= (3, 12) or struct.calcsize("P") != _WORD:
        return False
    try:
        _functions()
    except KernelBuildFailed:
        return False
    return _is_as_expected()


def dict_place(table: dict[Any, Any]) -> int:
    """Return where a dict's version lies."""
    return id(table) + _DICT_VERSION


def class_place(value: Any) -> int:
    """Return where the pointer to an object's class lies."""
    return id(value) + _CLASS


def attribute_place(owner: Any, name: str) -> int | None:
    """Return where the pointer to an attribute lies; None where it may be made anew at each access, or lies who knows where."""
    if type(owner) is CellType:
        return id(owner) + _CELL_CONTENTS if name == "cell_contents" else None
    if type(owner) is FunctionType:
        offset = _function_offsets().get(name)
        return None if offset is None else id(owner) + offset
    if name == "__dict__" and type(owner).__flags__ & _HAS_MANAGED_DICT:
        place, table = id(owner) + _MANAGED_DICT, owner.__dict__  # made by the first access
        return place if _word_at(place) == id(table) else None
    return None


def table_of_class(attributes: MappingProxyType[str, Any]) -> dict[Any, Any] | None:
    """Return the dict that ``vars(cls)`` shows; None where Python does not say which it is."""
    found = gc.get_referents(attributes)
    return found[0] if len(found) == 1 and type(found[0]) is dict else None


def watched(
    tables: Iterable[dict[Any, Any]],
    functions: Iterable[FunctionType] = (),
    classes: Iterable[type] = (),
    objects: Iterable[Any] = (),
) -> Words | None:
    """Return words that change as soon as a dict, a function's code, or an attribute of a class or of an object does.

    Args:
        tables: the dicts.
        functions: whose code may be exchanged.
        classes: those that cannot change are left out.
        objects: with their classes and all that these inherit from.

    Returns:
        None where words cannot be read here.
    """
    if not words_are_readable():
        return None
    instances, called = list(objects), list(functions)
    kinds = dict.fromkeys((*classes, *(base for value in instances for base in type(value).__mro__)))
    members = [table_of_class(vars(kind)) for kind in kinds if can_change(kind)]
    pointers = [attribute_place(one, "__code__") for one in called] + [attribute_place(one, "__dict__") for one in instances]
    if None in members or None in pointers:
        return None
    held: list[dict[Any, Any]] = [*tables, *(table for table in members if table is not None), *(vars(one) for one in instances)]
    places = [*map(dict_place, held), *map(class_place, instances), *(place for place in pointers if place is not None)]
    return Words(places, [*held, *called, *instances])


def can_change(kind: type) -> bool:
    """Whether attributes of a class can be set: not of those that C code defines."""
    return not kind.__flags__ & _CANNOT_CHANGE


def _word_at(place: int) -> int:
    return ctypes.c_uint64.from_address(place).value


@functools.cache
def _functions() -> tuple[Any, Any]:
    library = small_library("fa_are_same", _SOURCE)
    library.fa_are_same.restype = library.fa_read.restype = ctypes.c_int
    return library.fa_are_same, library.fa_read


@functools.cache
def _function_offsets() -> dict[str, int]:
    """Find where a function holds what, from one in which all of it is different."""
    held = object()

    def example(a: int = 12345, *, b: int = 54321) -> Any:
        return held, a, b

    words = {_word_at(id(example) + offset): offset for offset in range(2 * _WORD, FunctionType.__basicsize__, _WORD)}
    return {name: words[id(getattr(example, name))] for name in _OF_FUNCTIONS if id(getattr(example, name)) in words}


class _First:
    pass


class _Second:
    pass


def _is_as_expected() -> bool:
    """Try on objects of ours whether each kind of change is seen, and whether what is only read stays the same."""

    def function(a: int = 12345) -> int:
        return a

    def other(a: int = 54321) -> int:
        return a + 1

    table: dict[str, Any] = {"key": 1}
    value, cell = _First(), CellType(table)
    members = table_of_class(vars(_First))
    asked = ((value, "__dict__"), (function, "__code__"), (function, "__defaults__"))
    places = [attribute_place(owner, name) for owner, name in asked]
    if members is None or None in places or len(_function_offsets()) != len(_OF_FUNCTIONS):
        return False
    changes = [
        (dict_place(table), lambda: table.__setitem__("key", 2)),
        (dict_place(table), lambda: table.pop("key")),
        (dict_place(value.__dict__), lambda: setattr(value, "name", 1)),
        (dict_place(members), lambda: setattr(_First, "name", 1)),
        (class_place(value), lambda: setattr(value, "__class__", _Second)),
        (places[0], lambda: setattr(value, "__dict__", {})),
        (places[1], lambda: setattr(function, "__code__", other.__code__)),
        (places[2], lambda: setattr(function, "__defaults__", None)),
        (id(cell) + _CELL_CONTENTS, lambda: setattr(cell, "cell_contents", 1)),
    ]
    owners = [table, value, members, function, cell]
    for place, change in changes:
        words = Words([place or 0], owners)
        table.get("key"), vars(value).get("name"), function(1)
        if not words.are_same():
            return False
        change()
        if words.are_same():
            return False
    delattr(_First, "name")
    return True
