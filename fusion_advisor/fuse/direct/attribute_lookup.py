"""Says what decides an attribute of an object, where nothing but dicts does: its own ``__dict__`` and those of its classes.

While these dicts are as they were, reading the attribute gives what it gave, and an attribute that is missing stays missing.
Where code of its own is asked (a property, a ``__getattr__``), nothing is known. There are two exceptions.
``nn.Module.__getattr__`` looks into three dicts of the module. A ``__getattribute__`` whose source can be followed looks into
dicts too (:mod:`fusion_advisor.fuse.direct.getattribute_source`): the configurations of transformers have such.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, EllipsisType, FunctionType, GetSetDescriptorType, NoneType
from typing import Any

import torch

from fusion_advisor.fuse.direct.getattribute_source import Surroundings, Unreadable, followed
from fusion_advisor.runtime.torch_internals.compiled_code import trusts_tensors_in_dicts

IMMUTABLE = {
    int, float, complex, str, bytes, bool, NoneType, EllipsisType, CodeType, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
}  # fmt: skip
DICTS = (dict, OrderedDict)
_TABLES = ("_parameters", "_buffers", "_modules")
"""Where ``nn.Module.__getattr__`` looks for an attribute."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What decides an attribute.

    Attributes:
        is_found: whether the object has it.
        value: the attribute; None where there is none.
        tables: dicts that are looked into, the object's own first.
        code: functions that run.
    """

    is_found: bool
    value: Any
    tables: list[dict[Any, Any]]
    code: list[Any] = field(default_factory=list)


def is_constant(value: Any) -> bool:
    """Whether nothing about an object can change."""
    return type(value) in IMMUTABLE or (type(value) is tuple and all(map(is_constant, value)))


def look_up(owner: Any, name: str) -> Lookup | None:
    """Return what decides ``owner.name``, beside the object's class and the ``__dict__`` of each class that it inherits from.

    Args:
        owner: an object, no class.
        name: of the attribute.

    Returns:
        None where it is not known.
    """
    own = getattr(owner, "__dict__", None)
    if isinstance(owner, type) or type(own) is not dict:
        return None
    if next(_defined(owner, "__getattribute__")) is not object.__getattribute__:
        return _by_code(owner, own, name)
    found = _plain(owner, own, name)
    if found is None or found[0]:
        return None if found is None else Lookup(True, found[1], [own])
    fallback = list(_defined(owner, "__getattr__"))
    if not fallback:
        return Lookup(False, None, [own])
    if fallback[0] is not torch.nn.Module.__getattr__:
        return None
    tables = [own.get(table) for table in _TABLES]
    if any(type(table) is not dict or name in table for table in tables):
        return None
    return Lookup(False, None, [own, *(table for table in tables if table is not None)], [fallback[0]])


def _by_code(owner: Any, own: dict[str, Any], name: str) -> Lookup | None:
    """Return what decides an attribute of an object whose class has a ``__getattribute__`` in Python."""
    *steps, _ = _found_in(owner, "__getattribute__")
    tables = [own]
    code = [function for _, function in steps]

    def read(key: str, step: int = 0) -> Any:
        around = Surroundings(owner, read, lambda name: read(name, step + 1), tables)
        if step < len(steps):
            kind, function = steps[step]
            return followed(function, kind, around, key)
        if key == "__dict__" and all(type(one) is GetSetDescriptorType for one in _defined(owner, "__dict__")):
            return own
        kind, made = next(_found_in(owner, key), (object, None))
        if type(made) is property:
            code.append(made.fget)
            return followed(made.fget, kind, around)
        found = _plain(owner, own, key)
        if found is None:
            raise Unreadable
        if not found[0]:
            raise AttributeError
        return found[1]

    try:
        return Lookup(True, read(name), tables, code)
    except AttributeError:
        return Lookup(False, None, tables, code) if not any(True for _ in _defined(owner, "__getattr__")) else None
    except (Unreadable, RecursionError):
        return None


def _found_in(owner: Any, name: str) -> Iterator[tuple[type, Any]]:
    return ((kind, vars(kind)[name]) for kind in type(owner).__mro__ if name in vars(kind))


def _defined(owner: Any, name: str) -> Iterator[Any]:
    return (value for _, value in _found_in(owner, name))


def _plain(owner: Any, own: dict[str, Any], name: str) -> tuple[bool, Any] | None:
    """Return whether ``object`` finds an attribute, and which; None where the attribute may be made by code."""
    in_class = next(_defined(owner, name), None)
    is_harmless = is_constant(in_class) or type(in_class) in (FunctionType, dict)
    if not is_harmless:  # another object may be a descriptor, or become one
        return None
    if name in own:
        return True, own[name]
    if type(in_class) is FunctionType:  # a method is made at each access
        return None
    return (in_class is not None or any(True for _ in _defined(owner, name))), in_class


def is_left_alone(holder: Any, value: Any) -> bool:
    """Whether dynamo asks a value nothing either while its holder is the same: it does ask a tensor that no dict holds."""
    return not isinstance(value, torch.Tensor) or (type(holder) in DICTS and trusts_tensors_in_dicts())


def is_shared(value: Any) -> bool:
    """Whether others set items of a dict between two calls: a module's globals, or a registry, which is of a class of its own.

    So its version changes often, and the items that were read are compared one by one then. transformers notes in a registry what
    each class of models can record, whenever a model is made.
    """
    return isinstance(value, dict) and ("__builtins__" in value if type(value) is dict else type(value) not in DICTS)
