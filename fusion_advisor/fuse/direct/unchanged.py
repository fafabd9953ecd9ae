"""Finds the guards that cannot fail while nothing in the model was replaced, and notes what to compare to know that.

Dynamo's guards are a tree: each node is a value and what must hold of it, each edge how the value is reached from the one above.
A node cannot fail where the same objects are reached as when it held, and what is asked of them cannot change. For that

- a dict's version is compared, in place of its items,
- a module's or another object's class and ``__dict__`` are compared,
- any other attribute is read and compared with the object that it was.

A node whose value can change in a way that is not compared (a list, what ``hasattr`` says) stays with dynamo. A parameter that is
still in the same dict is not asked for its sizes: dynamo does not ask either (``skip_tensor_guards_with_matching_dict_tags``).
"""

from __future__ import annotations

import ast
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import starmap
from operator import attrgetter, getitem
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    EllipsisType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any

import torch

from fusion_advisor.runtime.torch_internals.compiled_code import dict_versions, trusts_tensors_in_dicts

_IMMUTABLE = {
    int, float, complex, str, bytes, bool, NoneType, EllipsisType, CodeType, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
}  # fmt: skip
_IDENTITY = {"TYPE_MATCH", "ID_MATCH", "NOT_NONE"}
_OF_TENSORS = _IDENTITY | {"TENSOR_MATCH", "DIMENSION_DYNAMIC_MARKING_GUARD", "NO_HASATTR"}
_OF_DICTS = _IDENTITY | {"DICT_CONTAINS", "DICT_LENGTH", "DICT_VERSION", "LENGTH_CHECK", "MAPPING_KEYS_MATCH"}
_FIXED_CLASS = (FunctionType, BuiltinFunctionType, MethodType, CellType, property, staticmethod, classmethod, MappingProxyType)
"""Objects of these keep their class, and have no ``__dict__`` that is looked into."""
_DICTS = (dict, OrderedDict)
_ATTRIBUTES = {
    "CodeGuardAccessor": "__code__", "ClosureGuardAccessor": "__closure__", "FuncDefaultsGuardAccessor": "__defaults__",
    "FuncKwDefaultsGuardAccessor": "__kwdefaults__", "TypeMROGuardAccessor": "__mro__",
}  # fmt: skip


class _Unknown(Exception):
    """It is not known what a guard looks at."""


class Unchanged:
    """What was reached from the model by guards that held, to see in bulk whether it is still the same."""

    def __init__(self) -> None:
        self.implied: dict[int, Any] = {}
        """Nodes of the tree that hold as long as :meth:`holds` does, by identity."""
        self._dicts: dict[int, dict[Any, Any]] = {}
        self._objects: dict[int, Any] = {}
        self._attributes: dict[str, dict[int, tuple[Any, Any]]] = {}
        self._items: dict[tuple[int, Any], tuple[Mapping[Any, Any], Any, Any]] = {}
        self._rows: list[tuple[Callable[[Any], Any], list[Any], list[Any]]] = []

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
            try:
                reached = self._reached(accessor, value)
            except (_Unknown, AttributeError, KeyError, IndexError, ValueError, SyntaxError, TypeError):
                is_implied = False
                continue
            is_implied &= self._is_left_alone(value, reached) and self.follow(below, reached)
        if is_implied:
            self.implied[id(node)] = node
        return is_implied

    def read(self, owner: Any, name: str) -> Any:
        """Read an attribute, to compare it from now on.

        Raises:
            _Unknown: it is another object each time.
        """
        get = attrgetter(name)
        value = get(owner)
        if get(owner) is not value:
            raise _Unknown
        self._attributes.setdefault(name, {})[id(owner)] = (owner, value)
        return value

    def finish(self) -> None:
        """Remember everything as it is now."""
        tables = list(self._dicts.values())
        self._tables, self._versions = tables, dict_versions(tables)
        self._instances = list(self._objects.values())
        self._classes = list(map(type, self._instances))
        self._rows = [
            (attrgetter(name), [owner for owner, _ in pairs.values()], [value for _, value in pairs.values()])
            for name, pairs in self._attributes.items()
        ]
        items = list(self._items.values())
        self._spaces = [space for space, _, _ in items]
        self._names = [name for _, name, _ in items]
        self._values = [value for _, _, value in items]

    def holds(self) -> bool:
        """Whether everything is as it was."""
        if dict_versions(self._tables) != self._versions:
            return False
        if not all(map(operator.is_, map(type, self._instances), self._classes)):
            return False
        try:
            return all(map(operator.is_, map(getitem, self._spaces, self._names), self._values)) and all(
                starmap(_is_same, self._rows)
            )
        except (AttributeError, KeyError, ValueError):  # there is none any more; a ValueError is an empty cell's
            return False

    def _is_known(self, node: Any, value: Any) -> bool:
        """Whether what is asked of a value itself can change in no way that is not compared."""
        asked = {type(guard).__name__ for guard in node.get_leaf_guards()}
        if type(value) in _IMMUTABLE:
            return not asked & {"OBJECT_ALIASING", "NO_TENSOR_ALIASING", "LAMBDA_GUARD"}
        if type(value) is tuple:
            return asked <= _IDENTITY | {"LENGTH_CHECK"}
        if type(value) in _DICTS:
            self._dicts[id(value)] = value
            return asked <= _OF_DICTS
        if isinstance(value, torch.Tensor):
            return asked <= _OF_TENSORS and not node.get_accessors()
        if not isinstance(value, _FIXED_CLASS):
            self._objects[id(value)] = value
        return asked <= _IDENTITY

    def _is_left_alone(self, holder: Any, value: Any) -> bool:
        """Whether dynamo asks a value nothing either while its holder is the same: it does ask a tensor that no dict holds."""
        return not isinstance(value, torch.Tensor) or (type(holder) in _DICTS and trusts_tensors_in_dicts())

    def _follow_items(self, managers: Mapping[int, Any], value: Any) -> bool:
        """Note what the guards of a dict's keys and values by place look at."""
        if type(value) not in _DICTS:
            return False
        is_implied = True
        items = list(value.items())
        for place, pair in managers.items():
            for node, part in zip(pair, items[place], strict=True):
                is_implied &= node is None or (not isinstance(part, torch.Tensor) and self.follow(node, part))
        return is_implied

    def _reached(self, accessor: Any, value: Any) -> Any:
        """Return what is reached from a value, and note how.

        Raises:
            _Unknown: it may be something else next time, and nothing would tell.
        """
        kind, text = type(accessor).__name__, accessor.repr()
        if kind == "TypeGuardAccessor":
            return type(value)
        if kind == "GetGenericDictGuardAccessor":
            return self.read(value, "__dict__")
        if kind == "TypeDictGuardAccessor":
            return vars(value)  # a class has one for life
        if kind in _ATTRIBUTES:
            return self.read(value, _ATTRIBUTES[kind])
        inside = text[text.index("(") + 1 : -1]
        if kind in ("GetAttrGuardAccessor", "GenericGetAttrGuardAccessor"):
            return self._attribute(value, inside)
        if kind == "DictGetItemGuardAccessor":
            return self._item(value, ast.literal_eval(inside))
        if kind in ("TupleGetItemGuardAccessor", "GetItemGuardAccessor") and type(value) is tuple:
            return value[ast.literal_eval(inside)]
        raise _Unknown

    def _attribute(self, value: Any, name: str) -> Any:
        if type(value) is ModuleType and name in vars(value):  # one version for all that is read of a Python module
            self._dicts[id(vars(value))] = vars(value)
            return vars(value)[name]
        return self.read(value, name)

    def _item(self, value: Any, name: Any) -> Any:
        if type(value) is MappingProxyType:  # a class's attributes
            self._items[id(value), name] = (value, name, value[name])
        elif type(value) not in _DICTS:
            raise _Unknown
        return value[name]


def _is_same(get: Callable[[Any], Any], owners: list[Any], values: list[Any]) -> bool:
    return all(map(operator.is_, map(get, owners), values))
