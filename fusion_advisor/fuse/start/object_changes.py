"""Attributes that a call sets of the objects that it is given: the keys and values that it puts into a KV cache.

Dynamo sets them behind its graph. A start without a trace writes down which they are and which result of the graph each gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.export.copied.call_objects import at, objects_in
from fusion_advisor.fuse.direct.straight_code import Constants
from fusion_advisor.fuse.start.call_tensors import Given, arguments
from fusion_advisor.fuse.start.described import CannotDescribe
from fusion_advisor.fuse.start.guard_tree import Differs, Node, reached
from fusion_advisor.fuse.start.outputs import written

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


@dataclass(frozen=True, slots=True)
class Bound:
    """Functions that read and set attributes of one call's objects; each takes the call's arguments by place or name.

    They hold the objects inside of those that the call passes, not these.

    Attributes:
        tensors: returns the tensors that they hold.
        compare_numbers: raises Differs where one of their numbers is not that of the traced call.
        set: given the graph's results and inputs ahead of the arguments, sets what the call sets.
    """

    tensors: Callable[[Mapping[str, Any]], list[Any]]
    compare_numbers: Callable[[Mapping[str, Any]], None]
    set: Callable[[Sequence[Any], Sequence[Any], Mapping[str, Any]], None]


class ObjectCode:
    """Reads and sets attributes of the objects that calls pass, by code that is written once for calls of one form.

    Args:
        inside: paths of the tensors that they hold.
        numbers: from :func:`asked_numbers`.
        sets: path of an object, name of an attribute, what describes the value that a call sets, and such a value.
    """

    def __init__(self, inside: Sequence[str], numbers: Sequence[Number], sets: Sequence[tuple[str, str, Any, Any]]) -> None:
        self._owners: dict[str, str] = {}
        self._lists: set[str] = set()
        self._constants = Constants()
        name_of = self._constants.name_of
        tensors = [self._item(*path.rpartition(".")[::2]) for path in inside]
        asked: list[str] = []
        for path, name, value in numbers:
            then, kind = name_of(value), name_of(type(value))
            asked += [f"now = getattr({self._owner(path)}, {name_of(name)}, None)"]
            asked += [f"if now is not {then} and (now != {then} or type(now) is not {kind}):"]
            asked += [f"    {name_of(_refuse)}({name_of(f'{path}.{name}')}, now, {then})"]
        made = [
            self._constants.setting(self._owner(path), name, written(form, value, self._constants))
            for path, name, form, value in sets
        ]
        inner = {
            "tensors(call)": [f"return [{', '.join(tensors)}]"],
            "compare_numbers(call)": [*asked, "return"],
            "set(results, inputs, call)": [*made, "return"],
        }
        lines = [line for head, body in inner.items() for line in (f"def {head}:", *(f"    {one}" for one in body))]
        names = ", ".join(head.partition("(")[0] for head in inner)
        self._bind = self._constants.function(self._owners.values(), [*lines, f"return {names}"])

    def _owner(self, path: str) -> str:
        """Return what stands for an object: a variable, which gets it once, or a look at the call for one that it passes."""
        if "." not in path:
            return f"call[{self._constants.name_of(path)}]"
        return self._owners.setdefault(path, f"owner{len(self._owners)}")

    def _item(self, path: str, name: str) -> str:
        if not name.isdecimal():
            return self._constants.reading(self._owner(path), name)
        self._lists.add(path)
        return f"{self._owner(path)}[{int(name)}]"

    def bind(self, call: Mapping[str, Any]) -> Bound:
        """Return what reads and sets attributes of a call's objects.

        Args:
            call: arguments by place or name.

        Raises:
            Differs: its objects are of another form.
        """
        try:
            owners = [at(path, call) for path in self._owners]
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise Differs(f"the call's objects hold others than those of the traced one ({error})") from error
        if not all(isinstance(one, list | tuple) for path, one in zip(self._owners, owners, strict=True) if path in self._lists):
            raise Differs("the call's objects hold others than those of the traced one")
        return Bound(*self._bind(*owners))


def _refuse(what: str, now: Any, then: Any) -> None:
    raise Differs(f"`{what}` is {now}, and was {then}")
