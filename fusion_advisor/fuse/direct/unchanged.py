"""Finds the guards that cannot fail while nothing in the model was replaced, and notes what to compare to know that.

Dynamo's guards are a tree: each node is a value and what must hold of it, each edge how the value is reached from the one above.
A node cannot fail where the same objects are reached as when it held, and what is asked of them cannot change. For that

- a dict's version is compared, in place of its items; so is the dict of a class,
- a module's or another object's class and ``__dict__`` are compared,
- a list's length is compared, and its items by identity,
- any other attribute is read and compared with the object that it was.

Where :mod:`fusion_advisor.fuse.direct.words` can, all but the last are compared in one compiled loop; else one by one in Python.

A node whose value can change in a way that is not compared (an attribute that a ``__getattr__`` of the model's makes) stays with
dynamo. A parameter that is still in the same dict is not asked for its sizes: dynamo of torch 2.11 does not ask either
(``skip_tensor_guards_with_matching_dict_tags``). It is compared by :mod:`fusion_advisor.fuse.direct.tensor_guard`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from itertools import chain
from operator import attrgetter
from types import BuiltinFunctionType, CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch

from fusion_advisor.fuse.direct.attribute_lookup import DICTS, Lookup, is_constant, is_left_alone, is_shared, look_up
from fusion_advisor.fuse.direct.guard_nodes import MISSING, OF_PAIRS, Unknown, asks_identity_below, index_of, inside_of, of_items
from fusion_advisor.fuse.direct.straight_code import are_same
from fusion_advisor.fuse.direct.words import (
    Words,
    attribute_place,
    can_change,
    class_place,
    dict_place,
    table_of_class,
    words_are_readable,
)
from fusion_advisor.runtime.torch_internals.compiled_code import dict_versions

_IDENTITY = {"TYPE_MATCH", "ID_MATCH", "NOT_NONE"}
OF_TENSORS = _IDENTITY | {"TENSOR_MATCH", "DIMENSION_DYNAMIC_MARKING_GUARD", "NO_HASATTR"}
_OF_DICTS = _IDENTITY | {"DICT_CONTAINS", "DICT_LENGTH", "DICT_VERSION", "LENGTH_CHECK"}
_ORDER = "MAPPING_KEYS_MATCH"
"""``OrderedDict.move_to_end`` changes the order and leaves the version as it was."""
_ABSENT = "NO_HASATTR"
_ABSENT_NAME = re.compile(r"hasattr\(.*, '(\w+)'\)$")
_MAY_CHANGE = OF_PAIRS | {"LAMBDA_GUARD"}
"""Guards that ask for more than their value."""
_FIXED_CLASS = (FunctionType, BuiltinFunctionType, MethodType, CellType, property, staticmethod, classmethod, MappingProxyType)
"""Objects of these keep their class, and have no ``__dict__`` that is looked into."""
_OF_ATTRIBUTES = ("GetAttrGuardAccessor", "GenericGetAttrGuardAccessor")
_READ_ONLY = {(property, "fget"), (property, "fset"), (staticmethod, "__func__"), (classmethod, "__func__")}
_ATTRIBUTES = {
    "CodeGuardAccessor": "__code__", "ClosureGuardAccessor": "__closure__", "FuncDefaultsGuardAccessor": "__defaults__",
    "FuncKwDefaultsGuardAccessor": "__kwdefaults__", "TypeMROGuardAccessor": "__mro__",
}  # fmt: skip


class Unchanged:
    """What was reached from the model by guards that held, to see in bulk whether it is still the same."""

    def __init__(self, *, in_words: bool = True, with_lists: bool = True) -> None:
        """Begin with nothing.

        Args:
            in_words: compare words of memory, where they can be read; False compares in Python.
            with_lists: compare the items of lists; False leaves each list to dynamo, for a model that sets items at each call.
        """
        self._in_words = in_words and words_are_readable()
        self._with_lists = with_lists
        self._not_held: Any = None  # an object that lives longer than this without being held
        self.implied: dict[int, Any] = {}
        """Nodes of the tree that hold as long as :meth:`holds` does, by identity."""
        self.roots: dict[int, Any] = {}
        """Nodes that :meth:`follow` began at, by identity."""
        self.may_share = False
        """Whether dynamo compares a tensor with others that may be another one although :meth:`holds` says that all is same."""
        self._dicts: dict[int, dict[Any, Any]] = {}
        self._lists: dict[int, list[Any]] = {}
        self._objects: dict[int, Any] = {}
        self._attributes: dict[str, dict[int, tuple[Any, Any]]] = {}
        self._globals: dict[tuple[int, Any], tuple[dict[Any, Any], Any, Any]] = {}
        self._are_attributes_same: Callable[[], bool] = are_same(())

    def follow(self, node: Any, value: Any) -> bool:
        """Note what a node and those below it look at.

        Args:
            node: of dynamo's tree; its guards hold now.
            value: what it guards.

        Returns:
            Whether the whole of it holds as long as what was noted is the same.
        """
        is_implied = self._is_known(node, value)
        managers = getattr(node, "get_key_value_managers", None)
        if managers is not None:
            is_implied &= self._follow_items(managers(), value)
        for accessor, below in zip(node.get_accessors(), node.get_child_managers(), strict=True):
            if self._asks_nothing(accessor, below, value):
                continue
            try:
                reached = self._reached(accessor, value)
            except MISSING:
                is_implied = False
                self.may_share |= asks_identity_below(below)
                continue
            is_implied &= self._may_leave(value, reached) and self.follow(below, reached)
        if is_implied:
            self.implied[id(node)] = node
        return is_implied

    def begin_at(self, node: Any, value: Any) -> None:
        """Follow a node of which every call has the same value."""
        self.roots[id(node)] = node
        self.follow(node, value)

    def follow_classes(self, node: Any, value: Any) -> None:
        """Note what is looked at of the classes of what a call passes: another call passes other objects, but of these classes.

        Args:
            node: of dynamo's tree; it stays with dynamo, and its guards hold now.
            value: what it guards.
        """
        asked = {type(guard).__name__ for guard in node.get_leaf_guards()}
        for accessor, below in zip(node.get_accessors(), node.get_child_managers(), strict=True):
            if type(accessor).__name__ == "TypeGuardAccessor":
                if "TYPE_MATCH" in asked:
                    self.follow(below, type(value))
                continue
            try:
                reached = value[index_of(accessor)] if type(value) is list else Unchanged()._reached(accessor, value)
            except MISSING:
                continue
            self.follow_classes(below, reached)

    def read(self, owner: Any, name: str) -> Any:
        """Read an attribute, to compare it from now on.

        Raises:
            Unknown: it is another object each time.
        """
        get = attrgetter(name)
        value = get(owner)
        if get(owner) is not value:
            raise Unknown
        self._attributes.setdefault(name, {})[id(owner)] = (owner, value)
        return value

    def compares(self, value: Any) -> bool:
        """Whether :meth:`holds` compares a dict's version, or an object's class and ``__dict__``."""
        if type(value) in DICTS:
            return id(value) in self._dicts
        has_table = id(value) in self._objects and id(value) in self._attributes.get("__dict__", ())
        return has_table and id(vars(value)) in self._dicts

    def finish(self) -> None:
        """Remember everything as it is now."""
        in_words = self._in_words
        places: list[int] = []
        owners: list[Any] = []
        if in_words:
            places += [dict_place(table) for table in self._dicts.values()]
            places += [class_place(value) for value in self._objects.values()]
            owners = [*self._dicts.values(), *self._objects.values()]
        self._tables = [] if in_words else list(self._dicts.values())
        self._versions = dict_versions(self._tables)
        self._instances = [] if in_words else list(self._objects.values())
        self._classes = list(map(type, self._instances))
        slow: list[tuple[Any, str, Any]] = []
        for name, pairs in self._attributes.items():
            found = [attribute_place(owner, name) if in_words else None for owner, _ in pairs.values()]
            places += [place for place in found if place is not None]
            slow += [(owner, name, value) for (owner, value), place in zip(pairs.values(), found, strict=True) if place is None]
            owners += [part for pair in pairs.values() for part in pair]
        self._are_attributes_same = are_same(slow)
        self._all_lists = list(self._lists.values())
        self._lengths, self._items = list(map(len, self._all_lists)), list(chain.from_iterable(self._all_lists))
        owners = [owner for owner in owners if owner is not self._not_held]
        self._words = Words(places, owners) if in_words else None
        spaces = list({id(space): space for space, _, _ in self._globals.values()}.values())
        self._space_words = Words(map(dict_place, spaces), spaces) if in_words else None
        self._all_words = Words([*places, *map(dict_place, spaces)], [*owners, *spaces]) if in_words else None
        self._spaces = [space for space, _, _ in self._globals.values()]
        self._names = [name for _, name, _ in self._globals.values()]
        self._values = [value for _, _, value in self._globals.values()]

    @property
    def words(self) -> int:
        """How many words of memory are compared."""
        return sum(len(words) for words in (self._words, self._space_words) if words is not None)

    def holds(self) -> bool:
        """Whether everything is as it was."""
        try:
            same = self._are_tables_same() and self._are_attributes_same()
            return same and (not self._all_lists or self._are_lists_same())
        except (AttributeError, KeyError, ValueError):  # there is none any more; a ValueError is an empty cell's
            return False

    def _are_tables_same(self) -> bool:
        """Whether dicts, classes, what words stand for, and globals are as they were.

        Raises:
            KeyError: a global is there no more.
        """
        together = self._all_words
        if together is not None:
            if together.are_same():
                return True
            together.read()  # ahead of the checks: what another thread changes meanwhile is found by the next call
            self._all_words = None
        if self._words is not None:
            if not self._words.are_same():
                return False
        elif dict_versions(self._tables) != self._versions:
            return False
        if not all(map(operator.is_, map(type, self._instances), self._classes)) or not self._are_globals_same():
            return False
        if self._space_words is not None:
            self._all_words = together
        return True

    def _are_globals_same(self) -> bool:
        """Whether each global that was read is what it was.

        Raises:
            KeyError: one is there no more.
        """
        words, self._space_words = self._space_words, None  # where one has changed, all are compared one by one from now on
        if words is None or not words.are_same():
            if words is not None:
                words.read()
            if not all(map(operator.is_, map(dict.__getitem__, self._spaces, self._names), self._values)):
                return False
        self._space_words = words
        return True

    def _are_lists_same(self) -> bool:
        """Whether each list has the items that it had: a list has no version."""
        if list(map(len, self._all_lists)) != self._lengths:
            return False
        return all(map(operator.is_, chain.from_iterable(self._all_lists), self._items))

    def _is_known(self, node: Any, value: Any) -> bool:
        """Whether what is asked of a value itself can change in no way that is not compared."""
        asked = self._asked(node)
        if is_constant(value):
            return not asked & _MAY_CHANGE
        if type(value) is tuple:
            return asked <= _IDENTITY | {"LENGTH_CHECK"}
        if type(value) is list and self._with_lists:
            self._lists[id(value)] = value
            return asked <= _IDENTITY | {"LENGTH_CHECK"}
        if type(value) is MappingProxyType:
            return asked <= _OF_DICTS and self._watch_class(value)
        if is_shared(value):
            self._objects[id(value)] = value
            return asked <= _IDENTITY
        if type(value) in DICTS:
            self._dicts[id(value)] = value
            return asked <= _OF_DICTS or (type(value) is dict and asked <= {*_OF_DICTS, _ORDER})
        if isinstance(value, torch.Tensor):
            return asked <= OF_TENSORS and not node.get_accessors()
        if not isinstance(value, _FIXED_CLASS):
            self._objects[id(value)] = value
        if _ABSENT in asked and not all(self._stays_absent(guard, value) for guard in node.get_leaf_guards()):
            return False
        return asked <= _IDENTITY | {_ABSENT}

    def _asked(self, node: Any) -> set[str]:
        """Return the names of the guards on a node's own value."""
        return {type(guard).__name__ for guard in node.get_leaf_guards()}

    def _may_leave(self, holder: Any, value: Any) -> bool:
        """Whether nobody has to ask for the layout of what a holder holds."""
        return is_left_alone(holder, value)

    def _watch_class(self, attributes: MappingProxyType[str, Any]) -> bool:
        """Note the dict of a class, by what ``vars`` shows of it; False where it cannot be found."""
        table = table_of_class(attributes)
        if table is None:
            return False
        self._dicts[id(table)] = table
        return True

    def _stays_absent(self, guard: Any, value: Any) -> bool:
        """Note what decides that an object lacks an attribute; False where it is not known."""
        if type(guard).__name__ != _ABSENT:
            return True
        name = _ABSENT_NAME.search(guard.verbose_code_parts()[0].partition("  #")[0].strip().removeprefix("not "))
        found = None if name is None else look_up(value, name[1])
        return found is not None and not found.is_found and self._watch_lookup(value, found)

    def _watch_lookup(self, owner: Any, found: Lookup) -> bool:
        """Note all that decides an attribute; False where a class cannot be looked into."""
        if not all(self._watch_class(vars(kind)) for kind in type(owner).__mro__ if can_change(kind)):
            return False
        self.read(type(owner), "__mro__")
        self.read(owner, "__dict__")
        for one in found.code:
            self.read(one, "__code__")
            for cell in one.__closure__ or ():
                self.read(cell, "cell_contents")
        self._objects[id(owner)] = owner
        self._dicts.update((id(table), table) for table in found.tables)
        return True

    def _asks_nothing(self, accessor: Any, below: Any, value: Any) -> bool:
        """Whether dynamo runs a property and asks nothing of what it gives; what decides that there is one is noted then.

        A static cache has two: they look at each layer.
        """
        if (
            type(accessor).__name__ not in _OF_ATTRIBUTES
            or below.get_leaf_guards()
            or below.get_child_managers()
            or any(of_items(below))
        ):
            return False
        found = next(
            (vars(kind)[name] for kind in type(value).__mro__ if (name := inside_of(accessor.repr())) in vars(kind)), None
        )
        own = getattr(value, "__dict__", None)
        if type(found) is not property or type(found.fget) is not FunctionType or type(own) is not dict:
            return False
        return self._watch_lookup(value, Lookup(True, None, [own], [found.fget]))

    def _follow_items(self, managers: Mapping[int, Any], value: Any) -> bool:
        """Note what the guards of a dict's keys and values by place look at."""
        if type(value) is not dict or is_shared(value):
            self.may_share |= any(asks_identity_below(one) for pair in managers.values() for one in pair if one is not None)
            return not managers
        is_implied = True
        items = list(value.items())
        for place, pair in managers.items():
            for node, part in zip(pair, items[place], strict=True):
                is_implied &= node is None or (not isinstance(part, torch.Tensor) and self.follow(node, part))
        return is_implied

    def _reached(self, accessor: Any, value: Any) -> Any:
        """Return what is reached from a value, and note how.

        Raises:
            Unknown: it may be something else next time, and nothing would tell.
        """
        kind, text = type(accessor).__name__, accessor.repr()
        if kind == "TypeGuardAccessor":
            return type(value)
        if kind == "GetGenericDictGuardAccessor":
            return self.read(value, "__dict__")
        if kind == "TypeDictGuardAccessor":
            return vars(value)  # a class has one for life
        if kind == "TypeMROGuardAccessor" and not all(self._watch_class(vars(one)) for one in value.__mro__ if can_change(one)):
            raise Unknown  # a class may hide what another one, which it inherits from, was asked for
        if kind in _ATTRIBUTES:
            return self.read(value, _ATTRIBUTES[kind])
        inside = inside_of(text)
        if kind in _OF_ATTRIBUTES:
            return self._attribute(value, inside)
        if kind == "DictGetItemGuardAccessor":
            return self._item(value, ast.literal_eval(inside))
        if kind in ("TupleGetItemGuardAccessor", "GetItemGuardAccessor") and type(value) is tuple:
            return value[ast.literal_eval(inside)]
        if type(value) is list and id(value) in self._lists:
            return value[index_of(accessor)]
        raise Unknown

    def _attribute(self, value: Any, name: str) -> Any:
        if type(value) is ModuleType and name in vars(value):
            return self._global(vars(value), name)
        if (type(value), name) in _READ_ONLY:
            return getattr(value, name)
        found = look_up(value, name)
        if found is not None and found.is_found and self._watch_lookup(value, found):
            return found.value
        return self.read(value, name)

    def _item(self, value: Any, name: Any) -> Any:
        if type(value) is MappingProxyType:  # a class's attributes
            if not self._watch_class(value):
                raise Unknown
        elif not isinstance(value, dict):
            raise Unknown
        return self._global(value, name) if is_shared(value) else value[name]

    def _global(self, space: dict[Any, Any], name: Any) -> Any:
        """Note one item of a shared dict: a script that runs a loop sets others between two calls."""
        found = dict.__getitem__(space, name)  # as dynamo reads it, whatever its class makes of a read
        self._globals[id(space), name] = (space, name, found)
        return found
