"""The code that a captured graph stands for: what is compared before each call, because dynamo does not guard it.

Dynamo looks through every function that ``forward`` calls, and guards those that it finds by name in a module's globals. It does
not guard what it finds in a class. So a helper method that was replaced, a ``__call__`` that a class got later, or a ``__code__``
that was put into a function (IPython's autoreload does that) would leave the old graph in place. Dynamo does say which code it
looked through. The functions with that code, and the classes' attributes that lead to them, are looked up once and compared here.

Not seen: a class attribute that is taken away in the same moment as another one is added, and what only C code leads to.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter, getitem
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from fusion_advisor.runtime.torch_internals.dynamo import untagged

_ALWAYS = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__", "__setattr__")
"""Attributes that decide how a module is called, whether dynamo looked through them or not."""
_DEEPEST = 4
"""Decorators around a function that are looked through."""
_TORCH = str(Path(torch.__file__).parent)
_code = attrgetter("__code__")


class WatchedCode:
    """The functions and classes that a model's graphs were captured from, as they were then."""

    def __init__(self, model: torch.nn.Module, codes: Iterable[CodeType]) -> None:
        """Look up what leads to some code.

        Args:
            model: whose modules' classes are searched, and the classes of the objects that these hold.
            codes: from :func:`~fusion_advisor.runtime.torch_internals.dynamo.traced_code`.
        """
        self._kinds = list(dict.fromkeys(map(type, model.modules())))
        self._spaces: list[Mapping[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        self.functions: list[FunctionType] = []
        """Whose code is compared."""
        self._codes: list[CodeType] = []
        self._titles: list[str] = []
        traced = set(codes)
        places = {(owner, name): None for owner in _bases(self._kinds) for name in _names_of(owner, traced)}
        holders = dict.fromkeys(_holders(traced, self._kinds))
        places |= holders
        outside = {owner for owner, _ in holders} - set(_bases(self._kinds))
        self._kinds += _kinds_inside(model, outside)
        for owner, name in places:
            self._watch(vars(owner), name, f"{owner.__qualname__}.{name}")
        found = (one for owner, name in places for one in functions_in(vars(owner)[name]))
        self.functions = list({id(one): one for one in found if one.__code__ in traced and not _is_torchs(one)}.values())
        self._codes = list(map(_code, self.functions))
        self.classes = tuple(dict.fromkeys((*_bases(self._kinds), *outside)))
        """Where attributes are looked up."""
        self._bases = list(map(vars, self.classes))
        self._sizes = list(map(len, self._bases))
        names = dict.fromkeys((*_ALWAYS, *self._names))
        self._resolved = {(kind, name): _resolve(kind, name) for kind in self._kinds for name in names}

    def _watch(self, space: Mapping[str, Any], name: str, title: str) -> None:
        self._spaces.append(space)
        self._names.append(name)
        self._values.append(space[name])
        self._titles.append(title)

    def change(self) -> str | None:
        """Name what is no longer what it was, or None: 30 functions and 20 classes take 3 µs.

        Nothing has changed while no attribute of ``classes`` and no code of ``functions`` has.
        """
        try:
            is_same = list(map(getitem, self._spaces, self._names)) == self._values
        except KeyError:
            is_same = False
        if not is_same:
            return next(title for title, space, name, value in self._rows() if space.get(name) is not value)
        if list(map(_code, self.functions)) != self._codes:
            pairs = zip(self.functions, self._codes, strict=True)
            return next(one.__qualname__ for one, code in pairs if one.__code__ != code)
        if list(map(len, self._bases)) != self._sizes:  # somebody added an attribute, or took one away
            for (kind, name), value in self._resolved.items():
                if _resolve(kind, name) is not value:
                    return f"{kind.__qualname__}.{name}"
            self._sizes = list(map(len, self._bases))
        return None

    def attributes(self) -> Iterator[tuple[str, Any]]:
        """Yield each class's attributes that lead to the code, by the class's full name and the attribute's, as they were."""
        for (kind, name), value in self._resolved.items():
            yield f"{kind.__module__}.{kind.__qualname__}.{name}", value
        yield from zip(self._titles, self._values, strict=True)

    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any], str, Any]]:
        return zip(self._titles, self._spaces, self._names, self._values, strict=True)


def _bases(kinds: Iterable[type]) -> list[type]:
    """Return the classes and all that they inherit from, each once, without ``object``."""
    return list(dict.fromkeys(base for kind in kinds for base in kind.__mro__ if base is not object))


def _names_of(owner: type, traced: set[CodeType]) -> list[str]:
    """Return the attributes of a class that lead to traced code, and those that decide how a module is called."""
    return [name for name, value in vars(owner).items() if name in _ALWAYS or _leads_to(value, traced)]


def _leads_to(value: Any, traced: set[CodeType]) -> bool:
    """Whether traced code is at the end of an attribute: one decorator's code stands around functions that were not traced."""
    functions = list(functions_in(value))
    inner = [one for one in functions if not any(other in functions for other in _inside(one))]
    return any(one.__code__ in traced and not _is_torchs(one) for one in inner)


def _is_torchs(function: FunctionType) -> bool:
    """Whether a function is torch's own. Of its classes only what decides how a module is called is compared, for the time."""
    return function.__code__.co_filename.startswith(_TORCH)


def functions_in(value: Any, depth: int = 0) -> Iterator[FunctionType]:
    """Yield the Python functions that an attribute leads to: through properties, partials and decorators.

    Args:
        value: the attribute.
        depth: of decorators around it.
    """
    if depth > _DEEPEST:
        return
    if isinstance(value, FunctionType):
        yield value
        inside = _inside(value)
    elif isinstance(value, staticmethod | classmethod):
        inside = [value.__func__]
    elif isinstance(value, property):
        inside = [value.fget]
    elif isinstance(value, functools.partial | functools.partialmethod | functools.cached_property):
        inside = [value.func]
    else:
        return
    for one in inside:
        yield from functions_in(one, depth + 1)


def _inside(function: FunctionType) -> list[Any]:
    """Return what a function's closure holds, and what a decorator notes of the function that it wraps."""
    inside = [getattr(function, "__wrapped__", None)]
    for cell in function.__closure__ or ():
        try:
            inside.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    return inside


def _holders(traced: set[CodeType], kinds: Iterable[type]) -> Iterator[tuple[type, str]]:
    """Yield the classes in which code can be found by its name, and the attribute; what a module's globals hold dynamo guards."""
    by_file: dict[str, list[ModuleType]] = {}
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str):
            by_file.setdefault(file, []).append(module)
    # Code of a notebook or of exec() belongs to no module's file.
    near = [
        sys.modules[name] for name in dict.fromkeys(("__main__", *(kind.__module__ for kind in kinds))) if name in sys.modules
    ]
    for code in traced:
        if code.co_filename.startswith(_TORCH):
            continue
        *path, last = code.co_qualname.split(".")
        for module in dict.fromkeys((*by_file.get(code.co_filename, ()), *near)):
            owner: Any = module
            for name in path:
                owner = vars(owner).get(name) if isinstance(owner, type | ModuleType) else None
            if not isinstance(owner, type):
                continue
            name = f"_{path[-1].lstrip('_')}{last}" if path and last.startswith("__") and not last.endswith("__") else last
            if name in vars(owner) and any(one.__code__ is code for one in functions_in(vars(owner)[name])):
                yield owner, name
                break


def _kinds_inside(model: torch.nn.Module, outside: set[type]) -> list[type]:
    """Return the classes of the objects that modules hold, where they inherit from a class whose code was traced."""
    if not outside:
        return []
    found = {type(value): None for module in model.modules() for value in vars(module).values()}
    return [kind for kind in found if not outside.isdisjoint(kind.__mro__) and not issubclass(kind, torch.nn.Module)]


def _resolve(kind: type, name: str) -> Any:
    return untagged(inspect.getattr_static(kind, name, None))
