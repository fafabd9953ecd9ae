"""What a record's type hints allow: the classes of a value, and the keys and items inside it.

Reading, writing and the schema all follow these answers, so that a record is described in one place: its dataclass.
"""

from __future__ import annotations

import enum
import functools
import json
import types
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from fusion_advisor import records

TAG = "kind"
"""Names the class of a value whose hint allows several."""


class Mismatch(Exception):
    """A value does not fit its hint; carries where and why, and never leaves this folder."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where or 'the top level'}: {why}")
        self._where, self._why = where, why

    def inside(self, step: str) -> Mismatch:
        """Return the same, seen from one level further out: a path is only spelt where there is something to say."""
        glue = "." if self._where and not self._where.startswith("[") else ""
        return Mismatch(f"{step}{glue}{self._where}", self._why)


@dataclass(frozen=True, eq=False)
class Wanted:
    """Types that a hint allows. Each hint has one such object, because hashing typing's own hints is slower than reading."""

    options: tuple[Any, ...]
    plain: frozenset[type]
    """Classes whose values are taken as they are."""
    is_list: bool
    is_tagged: bool


@functools.cache
def wanted_of(hint: object) -> Wanted:
    """Return what a hint allows."""
    options = options_of(hint)
    plain = frozenset(option for option in options if isinstance(option, type) and typing.get_origin(option) is None)
    return Wanted(options, plain, any(typing.get_origin(option) is tuple for option in options), is_tagged(options))


@functools.cache
def keys_of(cls: type) -> dict[str, Wanted]:
    """Return what each field of a record allows."""
    return {name: wanted_of(hint) for name, hint in hints_of(cls).items()}


@functools.lru_cache(maxsize=256)
def items_of(wanted: Wanted, count: int) -> tuple[Wanted, ...]:
    """Return what each item of a list of that length allows."""
    return tuple(map(wanted_of, item_hints(wanted.options, count)))


@functools.cache
def values_of(names: type[enum.Enum]) -> dict[str, enum.Enum]:
    """Return an enumeration's members by their values."""
    return {item.value: item for item in names}


@functools.cache
def classes_of(wanted: Wanted) -> dict[str, Any]:
    """Return the records among the types that are allowed, by their names."""
    return _classes(wanted.options)


@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
    """Return a record's type hints, references by name resolved."""
    return typing.get_type_hints(cls)


@functools.cache
def required_keys(cls: type) -> tuple[str, ...]:
    """Return the fields of a record that have no default."""
    return tuple(item.name for item in fields(cls) if item.default is MISSING and item.default_factory is MISSING)


@functools.cache
def options_of(hint: object) -> tuple[Any, ...]:
    """Return the members of a union, or the hint alone; a reference by name is looked up among the records."""
    if isinstance(hint, typing.ForwardRef):
        hint = hint.__forward_arg__
    if isinstance(hint, str):
        hint = getattr(records, hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(option for member in typing.get_args(hint) for option in options_of(member))
    return (hint,)


@functools.cache
def _classes(options: tuple[Any, ...]) -> dict[str, Any]:
    return {option.__name__: option for option in options if isinstance(option, type) and is_dataclass(option)}


@functools.cache
def is_tagged(options: tuple[Any, ...]) -> bool:
    """Whether a JSON object alone would not tell which member of the union it is."""
    others = [option for option in options if option is not type(None)]
    return len(others) > 1 and any(is_dataclass(option) for option in others)


@functools.lru_cache(maxsize=256)
def item_hints(options: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Return the hint of each item of a tuple of that length; None for each where no tuple is allowed.

    Raises:
        Mismatch: the hint is of a tuple of another length.
    """
    for option in options:
        if typing.get_origin(option) is not tuple:
            continue
        inner = typing.get_args(option)
        if len(inner) == 2 and inner[1] is Ellipsis:
            return (inner[0],) * count
        if len(inner) == count:
            return inner
        raise Mismatch("", f"expected {len(inner)} items, found {count}")
    return (None,) * count


def describe(options: tuple[Any, ...]) -> str:
    """Name the types for an error message."""
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    words = []
    for option in options:
        if typing.get_origin(option) is tuple:
            words.append("a list")
        elif isinstance(option, type) and issubclass(option, enum.Enum):
            words.append("one of " + ", ".join(str(item.value) for item in option))
        else:
            words.append(names.get(option) or f"an object ({getattr(option, '__name__', option)})")
    return " or ".join(words)


def shown(data: object) -> str:
    """Return a value as JSON, cut to 60 characters."""
    text = json.dumps(data, default=str)
    return text if len(text) <= 60 else text[:59] + "…"
