"""Lets dynamo's code read a model's parameters from where they lie, without the way there from the model.

At each call dynamo's code walks from the model to each parameter: ``self._modules["h"]._modules["0"]._parameters["weight"]``. The
walk takes 1.2 µs for each layer of GPT-2. It ends at the same dict while nothing in the model was replaced, and
:mod:`fusion_advisor.fuse.direct.unchanged` compares that before each call. So the code is given the dict here. It still reads the
parameter from the dict at each call, and no parameter lives longer than it would.

Dynamo also marks for the profiler when a graph's inputs are collected. That takes 2 µs at each call, profiler or not, and is left
out. It reads an open size through a function that switches dynamo off and on, which takes 2 µs more than to read it: here it is
off already.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType
from typing import Any

import torch

from fusion_advisor.fuse.direct.attribute_lookup import DICTS
from fusion_advisor.runtime.torch_internals.compiled_code import Instruction, like, names_of_dynamos_functions, rewritten

_LAST_PYTHON = (3, 12)
"""The newest whose calls are known to be written as they are below."""
_ENDS = ("CALL", "CALL_FUNCTION_EX", "CALL_INTRINSIC_1", "RETURN_VALUE", "RETURN_CONST")
_READS = ("LOAD_FAST", "DELETE_FAST")
_MARKS = ("record_pregraph_bytecode_enter", "record_pregraph_bytecode_exit")
_SIZES: Mapping[str, Callable[..., int]] = {
    "call_size": lambda value, dim: int(value.size(dim)),
    "call_stride": lambda value, dim: int(value.stride(dim)),
    "call_storage_offset": lambda value: int(value.storage_offset()),
}
"""What dynamo's functions of these names do."""
_HARMLESS = (*_MARKS, *_SIZES)
_NOT_FOUND = object()


@dataclass(frozen=True, slots=True)
class Arguments:
    """All arguments of a call in one tuple, of which the first are the same at each call."""

    first: tuple[Any, ...]


def with_known_tables(
    code: CodeType, known: Mapping[str, Any], compares: Callable[[Any], bool], space: Mapping[str, Any]
) -> CodeType | None:
    """Return code that reads fixed tables in place of the ways to them.

    Args:
        code: that dynamo made for a call.
        known: its variables that hold the same object at each call, by name.
        compares: says whether a dict, or an object's class and ``__dict__``, are compared before each call.
        space: the globals of the code.

    Returns:
        None where there is nothing to gain, or where the code is not understood.
    """
    if sys.version_info[:2] > _LAST_PYTHON:
        return None
    spaces = names_of_dynamos_functions(space)

    def change(instructions: list[Instruction]) -> bool:
        is_changed = _Shortened(instructions, known, compares, spaces).apply()
        is_changed |= _read_sizes_at_once(instructions, spaces)
        return _leave_out_marks(instructions, spaces) or is_changed

    return rewritten(code, change)


def _leave_out_marks(instructions: list[Instruction], spaces: Collection[str]) -> bool:
    """Put a function that does nothing in the place of both marks; False where there are not exactly two."""
    found = _loads(instructions, spaces, _MARKS)
    if [instructions[place + 1].argval for place in found] != list(_MARKS):
        return False
    for place in found:
        one = instructions[place]
        instructions[place : place + 2] = [like(one, "PUSH_NULL"), like(one, "LOAD_CONST", _no_mark)]
    return True


def _read_sizes_at_once(instructions: list[Instruction], spaces: Collection[str]) -> bool:
    """Put functions that do the same in the places of dynamo's that read a size; False where there are none."""
    found = _loads(instructions, spaces, _SIZES)
    for place in found:
        one, following = instructions[place : place + 2]
        instructions[place : place + 2] = [like(one, "PUSH_NULL"), like(one, "LOAD_CONST", _SIZES[following.argval])]
    return bool(found)


def _loads(instructions: Sequence[Instruction], spaces: Collection[str], names: Collection[str]) -> list[int]:
    """Return where functions of these names are read off ``torch._dynamo.utils`` to be called."""
    return [
        place
        for place, (one, following) in enumerate(pairwise(instructions))
        if one.opname == "LOAD_GLOBAL" and one.argval in spaces and (one.arg or 0) & 1
        if following.opname == "LOAD_ATTR" and following.argval in names
        if not one.is_jump_target and not following.is_jump_target
    ]


class _Tables:
    """Holds the tables that code reads: one slot for each, because a dict among a code's constants could not be hashed."""

    __slots__ = ()


def _no_mark(_mark: Any = None) -> None:
    """Stand for dynamo's mark for the profiler."""


class _Shortened:
    """Instructions of which the ways from the model are made shorter."""

    def __init__(
        self, instructions: list[Instruction], known: Mapping[str, Any], compares: Callable[[Any], bool], spaces: Collection[str]
    ) -> None:
        self._all, self._compares, self._spaces = instructions, compares, spaces
        others = Counter(one.argval for one in instructions if one.opname not in _READS and isinstance(one.argval, str))
        stores = Counter(one.argval for one in instructions if one.opname == "STORE_FAST")
        self._once = {name for name, count in stores.items() if count == others[name] == 1}
        self._known = {name: value for name, value in known.items() if name not in stores}
        self._given = set(self._known)
        """Variables that stay: of the call, and copies of its arguments."""
        self._harmless: set[str] = set()
        """Variables that hold functions of dynamo's own which change nothing."""
        self._tables: list[Any] = []
        self._made: list[Instruction] = []
        self._dropped: list[Instruction] = []

    def apply(self) -> bool:
        """Change the instructions in place; False leaves them as they are."""
        if any(one.exn_tab_entry is not None for one in self._all):
            return False
        place = self._shorten_start()
        for one in self._all[place:]:
            if one.opname in _READS and one.argval in self._known and one.argval not in self._given:
                self._dropped.append(one)
                if one.opname == "LOAD_FAST":
                    self._load(one, self._known[one.argval])
            else:
                self._made.append(one)
        targets = {id(one.target) for one in self._all if one.target is not None}
        if not self._dropped or any(id(one) in targets for one in self._dropped):
            return False
        if self._tables:
            names = [f"t{place}" for place in range(len(self._tables))]
            holder = type("Tables", (_Tables,), {"__slots__": names})()
            for name, table in zip(names, self._tables, strict=True):
                setattr(holder, name, table)
            for one in self._made:
                one.argval = holder if one.argval is _Tables else one.argval
        self._all[:] = self._made
        return True

    def _shorten_start(self) -> int:
        """Go through what runs ahead of the graph; return the place of the first instruction that was not looked at."""
        instructions, place, calls = self._all, 0, 0
        while place + 1 < len(instructions):
            one, following = instructions[place : place + 2]
            if one.is_jump_target or one.target is not None or (one.opname in _ENDS and not (one.opname == "CALL" and calls)):
                break
            calls -= one.opname == "CALL"
            if one.opname == "LOAD_FAST" and one.argval in self._known:
                place = self._shorten_way(place)
                continue
            if one.opname == "PUSH_NULL" and following.opname == "LOAD_FAST" and following.argval in self._harmless:
                calls += 1
            if self._is_harmless(one, following):
                calls += 1
                self._note_harmless(place + 2)
            self._made.append(one)
            place += 1
        return place

    def _is_harmless(self, one: Instruction, following: Instruction) -> bool:
        """Whether two instructions find a function of dynamo's that changes nothing, to call it."""
        is_of_dynamo = one.opname == "LOAD_GLOBAL" and bool((one.arg or 0) & 1) and one.argval in self._spaces
        return is_of_dynamo and following.opname == "LOAD_ATTR" and following.argval in _HARMLESS

    def _note_harmless(self, place: int) -> None:
        """Note the variable that holds such a function from now on, if one does."""
        copy, store = self._all[place : place + 2]
        if copy.opname == "COPY" and copy.arg == 1 and store.opname == "STORE_FAST" and store.argval in self._once:
            self._harmless.add(store.argval)

    def _shorten_way(self, start: int) -> int:
        """Follow what is read of a known object; return the place of the first instruction after it."""
        first = self._all[start]
        value, place = self._known[first.argval], start + 1
        while place + 1 < len(self._all):
            one, following = self._all[place : place + 2]
            if one.is_jump_target or following.is_jump_target:
                break
            if one.opname == "COPY" and one.arg == 1 and following.opname == "STORE_FAST" and following.argval in self._once:
                self._known[following.argval] = value
                if isinstance(value, Arguments):
                    self._given.add(following.argval)
                    self._made += [like(first, "LOAD_FAST", first.argval), following]
                place += 2
                continue
            found, step = self._step(value, one, following)
            if found is _NOT_FOUND or isinstance(found, torch.Tensor):
                break
            value, place = found, place + step
        if isinstance(value, Arguments) or (place == start + 1 and first.argval in self._given):
            self._made.append(first)
            self._dropped += self._all[start + 1 : place]
        else:
            self._dropped += self._all[start:place]
            self._load(first, value)
        return place

    def _step(self, value: Any, one: Instruction, following: Instruction) -> tuple[Any, int]:
        """Return what is read of a value, and how many instructions read it."""
        if one.opname == "LOAD_ATTR" and (sys.version_info < (3, 12) or not (one.arg or 0) & 1):
            is_sure = _is_plain_module(value, one.argval) and self._compares(value)
            return (vars(value).get(one.argval, _NOT_FOUND) if is_sure else _NOT_FOUND), 1
        if one.opname == "LOAD_CONST" and following.opname == "BINARY_SUBSCR" and type(one.argval) in (str, int):
            if isinstance(value, Arguments):
                is_first = type(one.argval) is int and 0 <= one.argval < len(value.first)
                return (value.first[one.argval] if is_first else _NOT_FOUND), 2
            if type(value) in DICTS and self._compares(value):
                return value.get(one.argval, _NOT_FOUND), 2
        return _NOT_FOUND, 0

    def _load(self, at: Instruction, value: Any) -> None:
        """Write what puts a table on the stack."""
        place = next((place for place, table in enumerate(self._tables) if table is value), len(self._tables))
        if place == len(self._tables):
            self._tables.append(value)
        self._made += [like(at, "LOAD_CONST", _Tables), like(at, "LOAD_ATTR", f"t{place}")]


def _is_plain_module(value: Any, name: str) -> bool:
    """Whether an attribute of a value is that of its own ``__dict__``, if it has one."""
    return (
        isinstance(value, torch.nn.Module)
        and type(value).__getattribute__ is object.__getattribute__
        and not any(name in vars(kind) for kind in type(value).__mro__)
    )
