"""Attributes that a call sets of the objects that it is given: the keys and values that it puts into a KV cache.

Dynamo sets them behind its graph. A start without a trace writes down which they are and which result of the graph each gets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.export.copied.call_objects import at, objects_in
from fusion_advisor.fuse.start.call_tensors import Given, arguments
from fusion_advisor.fuse.start.described import CannotDescribe
from fusion_advisor.fuse.start.guard_tree import Differs, Node, reached
from fusion_advisor.fuse.start.outputs import Make

Place = tuple[str, str]
"""Path of an object of the call, ``past_key_values.layers.0``, and the name of an attribute."""


@dataclass(frozen=True, slots=True)
class ObjectState:
    """What the objects of a call hold, as it is when this is made.

    Attributes:
        before: path of each object, the object, and its attributes.
    """

    before: tuple[tuple[str, Any, dict[str, Any]], ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Given) -> ObjectState:
        """Look at a call.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            given: what they are.

        Raises:
            CannotDescribe: an object lies where no path leads to.
        """
        call = arguments(args, kwargs)
        found = [(path, owner) for name, value in given.objects.items() for path, owner in objects_in(name, value)]
        if any(at(path, call) is not owner for path, owner in found):
            raise CannotDescribe("an object of the call lies in a container that has no places")
        return cls(tuple((path, owner, dict(vars(owner))) for path, owner in found))

    def changes(self) -> dict[Place, Any]:
        """Return what has been set since, by place.

        Raises:
            CannotDescribe: an attribute was deleted.
        """
        found: dict[Place, Any] = {}
        for path, owner, earlier in self.before:
            now = vars(owner)
            if not earlier.keys() <= now.keys():
                raise CannotDescribe("the call deletes an attribute of an object that it passes")
            changed = (name for name, value in now.items() if name not in earlier or earlier[name] is not value)
            found |= {(path, name): now[name] for name in changed}
        return found

    def restore(self) -> None:
        """Put back what has been set since."""
        for _, owner, earlier in self.before:
            now = vars(owner)
            for name in now.keys() - earlier.keys():
                del now[name]
            now.update(earlier)


def in_order(changes: Mapping[Place, Any], places: Sequence[Place]) -> list[Any]:
    """Return what a call has set, in the order of some places.

    Args:
        changes: from :meth:`ObjectState.changes`.
        places: that a call like it sets.

    Raises:
        Differs: it set other attributes.
    """
    if changes.keys() != set(places):
        raise Differs("the call sets other attributes of its objects than the traced one")
    return [changes[place] for place in places]


def untold_change(written: Written, places: Sequence[Place]) -> str:
    """Say which tensor a call puts in place of another one without setting one of some attributes; empty where none is.

    A list that grows, say, is no attribute that is set.

    Args:
        written: by the call.
        places: that it sets.
    """
    ends = tuple(f"{path}.{name}" for path, name in places)
    untold = [name for name in written.made if not any(name.endswith(end) or f"{end}." in name for end in ends)]
    return f"the call puts another tensor in place of `{untold[0]}`" if untold else ""


Number = tuple[str, str, bool | int | float]
"""Path of an object, name of an attribute, and its value."""


def asked_numbers(nodes: Sequence[tuple[Node, Any]], state: ObjectState) -> list[Number]:
    """Return the numbers of the call's objects that a trace had asked for: the window of a cache, how many tokens it has seen.

    Calls of a range are of one form: their objects hold the same but for tensors' sizes, numbers and flags of their own.

    Args:
        nodes: of the frame's variables, with their values.
        state: the objects of the call.

    Raises:
        CannotDescribe: one is no attribute of an object.
    """
    paths = {id(owner): path for path, owner, _ in state.before}
    return list(dict.fromkeys(found for node, value in nodes for found in _asked(node, value, paths, "", "")))


def _asked(node: Node, value: Any, paths: Mapping[int, str], path: str, name: str) -> Iterator[Number]:
    """Yield the numbers below a node; ``path`` is of the object that it lies in, ``name`` of the attribute, where it is one."""
    is_flag = isinstance(value, bool) and name.startswith("_")
    if path and node.facts and (is_flag or type(value) in (int, float)):
        if not name:
            raise CannotDescribe(f"the trace had asked for a number in an object that the call passes, `{node.title}`")
        yield path, name, value
    own = paths.get(id(value), "")
    for kind, text, below in node.below:
        inner = reached(kind, text, value)
        if kind.startswith("Type"):
            continue  # a class is the same for all calls
        if own and inner is vars(value):
            yield from _below_attributes(below, inner, paths, own)
        else:
            yield from _asked(below, inner, paths, own or path, text if own else "")
    yield from _items(node, value, paths, path)


def _below_attributes(node: Node, table: dict[str, Any], paths: Mapping[int, str], path: str) -> Iterator[Number]:
    for kind, text, below in node.below:
        yield from _asked(below, reached(kind, text, table), paths, path, text.strip("'\""))
    yield from _items(node, table, paths, path, are_attributes=True)


def _items(
    node: Node, value: Any, paths: Mapping[int, str], path: str, *, are_attributes: bool = False
) -> Iterator[Number]:  # fmt: skip
    items = [*dict.items(value)] if node.items else []
    for place, (_, item) in node.items.items():
        if item is not None:
            yield from _asked(item, items[place][1], paths, path, items[place][0] if are_attributes else "")


def compare_numbers(numbers: Sequence[Number], call: Mapping[str, Any]) -> None:
    """Compare the numbers of a call's objects with those of the traced one.

    Args:
        numbers: from :func:`asked_numbers`.
        call: arguments by place or name.

    Raises:
        Differs: one is another number.
    """
    owner, last = None, ""
    for path, name, value in numbers:
        if path != last:
            owner, last = at(path, call), path
        now = getattr(owner, name, None)
        if now != value or type(now) is not type(value):
            raise Differs(f"`{path}.{name}` is {now}, and was {value}")


@dataclass(frozen=True, slots=True)
class Setter:
    """Sets attributes of one object of a call.

    Attributes:
        path: of the object.
        makes: name of each attribute, and what makes its value.
    """

    path: str
    makes: tuple[tuple[str, Make], ...]

    def run(self, results: Sequence[Any], inputs: Sequence[Any], call: Mapping[str, Any]) -> None:
        """Set them.

        Args:
            results: of the graph.
            inputs: of the graph.
            call: the call's arguments by place or name.
        """
        owner = at(self.path, call)
        for name, make in self.makes:
            setattr(owner, name, make(results, inputs, call))


def setters_of(makes: Mapping[Place, Make]) -> tuple[Setter, ...]:
    """Return what sets attributes, one for each object.

    Args:
        makes: by place, what makes the value.
    """
    paths = dict.fromkeys(path for path, _ in makes)
    return tuple(Setter(one, tuple((name, make) for (path, name), make in makes.items() if path == one)) for one in paths)
