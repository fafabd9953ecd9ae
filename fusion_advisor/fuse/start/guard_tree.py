"""Dynamo's guards of a captured call in plain data, and the same as a tree that is checked in another process.

Each node is a value, with what dynamo asks of it: its class, its number, whether a dict has a key. Each edge is how the value is
reached from the one above. Here a value's identity becomes its name and its code, for an address means nothing elsewhere. A guard
that is not known here is refused, so that nothing the trace had read goes unasked.
"""

from __future__ import annotations

import ast
import builtins
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fusion_advisor.fuse.start.described import CannotDescribe, described, layout, name_of

_ATTRIBUTES = {
    "GetGenericDictGuardAccessor": "__dict__", "CodeGuardAccessor": "__code__", "ClosureGuardAccessor": "__closure__",
    "FuncDefaultsGuardAccessor": "__defaults__", "FuncKwDefaultsGuardAccessor": "__kwdefaults__",
    "TypeMROGuardAccessor": "__mro__",
}  # fmt: skip
_BY_NAME = ("GetAttrGuardAccessor", "GenericGetAttrGuardAccessor")
BY_KEY = ("DictGetItemGuardAccessor",)
_BY_PLACE = ("TupleGetItemGuardAccessor", "ListGetItemGuardAccessor", "GetItemGuardAccessor")


class Differs(Exception):
    """Something is not as it was when the model was traced; the message says what, and what it was."""


@dataclass(slots=True)
class Node:
    """A value that was read.

    Attributes:
        title: how it was reached, for a sentence.
        guards: names of dynamo's guards.
        facts: what was asked of it, and the answer.
        below: kind and argument of an accessor, and what is reached with it.
        items: of a dict by place, its keys and values.
        source: of a root, as dynamo calls it.
        group: nodes of one group are one object; -1: of none.
    """

    title: str
    guards: tuple[str, ...] = ()
    facts: list[list[Any]] = field(default_factory=list)
    below: list[tuple[str, str, Node]] = field(default_factory=list)
    items: dict[int, tuple[Node | None, Node | None]] = field(default_factory=dict)
    source: str = ""
    group: int = -1

    def without(self, is_left_out: Callable[[Node], bool]) -> Node:
        """Return the node without some of what lies below it.

        Args:
            is_left_out: whether a node is left out.
        """
        below = [(kind, text, one.without(is_left_out)) for kind, text, one in self.below if not is_left_out(one)]
        items: dict[int, tuple[Node | None, Node | None]] = {}
        for place, pair in self.items.items():
            key, item = (None if one is None or is_left_out(one) else one.without(is_left_out) for one in pair)
            if key is not None or item is not None:
                items[place] = (key, item)
        return replace(self, below=below, items=items)

    # What follows is how dynamo's own nodes are read: ``fuse.direct.unchanged`` follows both.

    def get_leaf_guards(self) -> list[Any]:
        """Return the guards; their classes have dynamo's names."""
        absent = iter([name for kind, name, is_there in self.facts if kind == "has" and not is_there])
        return [_kind(name)(next(absent, "") if name == "NO_HASATTR" else "") for name in self.guards]

    def get_source(self) -> str:
        """Return a root's name."""
        return self.source

    def get_accessors(self) -> list[Any]:
        """Return the accessors; their classes have dynamo's names."""
        return [_kind(kind)(text) for kind, text, _ in self.below]

    def get_child_managers(self) -> list[Node]:
        """Return what the accessors reach."""
        return [node for _, _, node in self.below]

    def get_key_value_managers(self) -> Mapping[int, tuple[Node | None, Node | None]]:
        """Return a dict's keys and values by place."""
        return self.items


class _Named:
    """An accessor or a guard of dynamo's, as far as it is read."""

    def __init__(self, text: str) -> None:
        self._text = text

    def repr(self) -> str:
        """Return an accessor's description."""
        return f"{type(self).__name__}({self._text})"

    def verbose_code_parts(self) -> list[str]:
        """Return a guard's text."""
        return [f"not hasattr(it, '{self._text}')"]


@functools.cache
def _kind(name: str) -> type[_Named]:
    return type(name, (_Named,), {})


@dataclass(slots=True)
class Tree:
    """Everything that was read.

    Attributes:
        variables: by name, the frame's variables: the module, cells of a closure, and the call's own arguments.
        globals: of the function's own module, by name.
        modules: Python modules, by name.
        builtins: by name.
        groups: numbers of groups of one object, by how dynamo writes the first way to it.
        conditions: on sizes and strides of the call's tensors; see :mod:`fusion_advisor.fuse.start.size_conditions`.
    """

    variables: dict[str, Node] = field(default_factory=dict)
    globals: dict[str, Node] = field(default_factory=dict)
    modules: dict[str, Node] = field(default_factory=dict)
    builtins: dict[str, Node] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    conditions: list[Any] = field(default_factory=list)

    def frame_nodes(self) -> list[Node]:
        """Return the roots of the frame: its variables, and its globals as one node."""
        for name, node in self.variables.items():
            node.source = f"L['{name}']"
        below = [("DictGetItemGuardAccessor", repr(name), node) for name, node in self.globals.items()]
        return [*self.variables.values(), Node("globals", below=below, source="G")]


def reached(kind: str, text: str, value: Any) -> Any:
    """Return what an accessor reaches from a value.

    Raises:
        CannotDescribe: it is an accessor that is not known here.
        AttributeError, LookupError, TypeError: there is nothing.
    """
    if kind in _BY_NAME and text.isidentifier():
        return getattr(value, text)
    if kind in _ATTRIBUTES:
        return getattr(value, _ATTRIBUTES[kind])
    if kind == "TypeGuardAccessor":
        return type(value)
    if kind == "TypeDictGuardAccessor":
        return vars(value)
    if kind in BY_KEY or (kind in _BY_PLACE and isinstance(value, tuple | list)):
        try:
            key = _literal(text)
            return dict.__getitem__(value, key) if isinstance(value, dict) else value[key]
        except (ValueError, SyntaxError) as error:
            raise CannotDescribe(f"dynamo's {kind}({text:.60})") from error
    raise CannotDescribe(f"dynamo's {kind} of a {name_of(type(value))}")


def holder_of(kind: type, name: str) -> str:
    """Return the full name of the class that an attribute of a class is found in; empty where there is none.

    Args:
        kind: the class, which may inherit it.
        name: of the attribute.
    """
    return next((name_of(one) for one in kind.__mro__ if name in vars(one)), "")


@functools.lru_cache(maxsize=1024)
def _literal(text: str) -> Any:
    return ast.literal_eval(text)


_ANSWERS: dict[str, Callable[[Any, Any], Any]] = {
    "class": lambda value, _: name_of(type(value)),
    "is": lambda value, _: described(value),
    "tensor": lambda value, open_at: layout(value, open_at) if isinstance(value, torch.Tensor) else "no tensor",
    "is not": lambda value, _: None if value is not None else "None",
    "length": lambda value, _: len(value),
    "keys": lambda value, _: described(list(value)),
    "contains": lambda value, key: key in value,
    "has": hasattr,
    "found in": holder_of,
}


@dataclass(slots=True)
class Seen:
    """What a look at a model has come across.

    Attributes:
        tensors: in the tree's order.
        groups: the object of each group, with the title of the first way to it.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    groups: dict[int, tuple[Any, str]] = field(default_factory=dict)

    def add(self, node: Node, value: Any) -> None:
        """Note a value.

        Raises:
            Differs: another way to the same object leads elsewhere now.
        """
        if isinstance(value, torch.Tensor) and node.guards:
            self.tensors.append(value)
        if node.group >= 0:
            other, title = self.groups.setdefault(node.group, (value, node.title))
            if other is not value:
                raise Differs(f"`{node.title}` and `{title}` were one object")


def check(node: Node, value: Any, seen: Seen | None = None) -> None:
    """Compare a value, and all that is reached from it, with what was read.

    Args:
        node: what was read.
        value: what is there now.
        seen: gets what was looked at.

    Raises:
        Differs: with the first difference.
    """
    for kind, argument, expected in node.facts:
        try:
            now = _ANSWERS[kind](value, argument)
        except (CannotDescribe, TypeError, AttributeError) as error:
            raise Differs(f"`{node.title}` is {error}, and was {_shown(expected)}") from error
        if now != expected or type(now) is not type(expected):
            raise Differs(_sentence(node.title, kind, argument, now, expected))
    if seen is not None:
        seen.add(node, value)
    for below, reach in _reaches(node, value):
        try:
            inner = reach()
        except (AttributeError, LookupError, TypeError, CannotDescribe) as error:
            raise Differs(f"`{below.title}` is not there, and the trace had read it") from error
        check(below, inner, seen)


def _reaches(node: Node, value: Any) -> Iterator[tuple[Node, Callable[[], Any]]]:
    """Yield what lies below a node, and how it is reached."""
    if node.items:
        items = list(dict.items(value)) if isinstance(value, dict) else []
        for place, pair in node.items.items():
            for one, part in zip(pair, (0, 1), strict=True):
                if one is not None:
                    yield one, functools.partial(_part_of_item, items, place, part)
    for kind, text, below in node.below:
        yield below, functools.partial(reached, kind, text, value)


def _part_of_item(items: Sequence[tuple[Any, Any]], place: int, part: int) -> Any:
    return items[place][part]


def _sentence(title: str, kind: str, argument: Any, now: Any, expected: Any) -> str:
    if kind in ("contains", "has"):
        return f"`{title}` has {'' if now else 'no '}`{argument}` now"
    if kind == "found in":
        return f"`{title}.{argument}` is that of {now or 'no class'}, and was that of {expected}"
    if kind == "length":
        return f"`{title}` has {now} items, and had {expected}"
    return f"`{title}` is {_shown(now)}, and was {_shown(expected)}"


def _shown(description: Any) -> str:
    if isinstance(description, dict) and "code" in description:
        return f"{description.get('function', 'code')} ({description['code'][:8]})"
    if isinstance(description, dict) and len(description) == 1:
        description = next(iter(description.values()))
    return f"{description}"[:120]


def pattern(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return for each tensor the place of the first that is the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]


def roots(tree: Tree, variables: Mapping[str, Any], space: dict[str, Any]) -> Iterator[tuple[Node, Any]]:
    """Yield each root of a tree with its value in this process.

    Args:
        tree: as recorded.
        variables: of the frame.
        space: the function's globals.

    Raises:
        Differs: a variable, a global or a module is not there.
    """
    for names, found, word in (
        (tree.variables, variables, "variable"),
        (tree.globals, space, "global"),
        (tree.modules, sys.modules, "module"),
        (tree.builtins, vars(builtins), "built-in"),
    ):
        for name, node in names.items():
            if name not in found:
                raise Differs(f"the {word} `{name}` is not there, and the trace had read it")
            yield node, found[name]


def step(kind: str, text: str) -> str:
    """Return an accessor as it is written in Python.

    Args:
        kind: of dynamo's accessor.
        text: its argument.
    """
    if kind in _BY_NAME:
        return f".{text}"
    if kind in (*BY_KEY, *_BY_PLACE):
        return f"[{text}]"
    return f".{_ATTRIBUTES.get(kind, 'class')}"
