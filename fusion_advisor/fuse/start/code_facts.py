"""The code that a trace went through: found again in another process by module and name, and compared by what it does.

A file that was edited, a method that was replaced, a subclass that overrides one: each gives another digest. The code of torch
and of Python itself stands for their versions.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from fusion_advisor.fuse.direct.code_guard import WatchedCode, functions_in
from fusion_advisor.fuse.start.described import CannotDescribe, code_digest, described
from fusion_advisor.fuse.start.guard_tree import Differs

_TORCH = str(Path(torch.__file__).parent) + os.sep
_PYTHON = str(Path(os.__file__).parent) + os.sep
_PACKAGES = ("site-packages", "dist-packages")


def places_of(codes: Iterable[CodeType], model: torch.nn.Module) -> list[list[str]]:
    """Return module, name and digest of code.

    Args:
        codes: that dynamo went through.
        model: the modules of its classes are searched too, for code that belongs to no file.

    Raises:
        CannotDescribe: some of it is not found by its name.
    """
    kinds = {type(module).__module__: None for module in model.modules()}
    own = [code for code in codes if not _is_of_a_version(code)]
    files = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
    homes = [files[code.co_filename] for code in own if code.co_filename in files]
    made = [code for code in own if code.co_filename not in files]  # a dataclass's __init__, say: in no file
    holders = [one for one in gc.get_referrers(*made) if isinstance(one, FunctionType)] if made else []
    near = list(dict.fromkeys((*kinds, *homes, *(str(one.__globals__.get("__name__")) for one in holders), "__main__")))
    indices: dict[str, dict[str, list[CodeType]]] = {}
    found = []
    for code in own:
        home = files.get(code.co_filename)
        for name in near if home is None else (home, *near):
            if name not in indices:
                indices[name] = _index(sys.modules[name]) if name in sys.modules else {}
            if any(one is code for one in indices[name].get(code.co_qualname, ())):
                found.append([name, code.co_qualname, code_digest(code)])
                break
        else:
            raise CannotDescribe(f"the code `{code.co_qualname}` is not found by its name")
    return found


def find(places: Iterable[list[str]]) -> list[CodeType]:
    """Return code of this process by module, name and digest.

    Args:
        places: from :func:`places_of`.

    Raises:
        Differs: there is none, or it does something else.
    """
    indices: dict[str, dict[str, list[CodeType]]] = {}
    digests: dict[int, str] = {}
    found = []
    for home, name, digest in places:
        if home not in indices:
            if not isinstance(sys.modules.get(home), ModuleType):
                raise Differs(f"the Python module `{home}` is not imported")
            indices[home] = _index(sys.modules[home])
        candidates = indices[home].get(name, [])
        for code in candidates:
            digests.setdefault(id(code), code_digest(code))
        same = [code for code in candidates if digests[id(code)] == digest]
        if not same:
            raise Differs(f"the code of `{home}.{name}` is {'another one' if candidates else 'not there'}")
        found += same
    return found


def attributes(watched: WatchedCode) -> dict[str, Any]:
    """Return what classes lead to the code, as digests by class and attribute.

    Args:
        watched: of a model and the code of its trace.
    """
    known: dict[int, Any] = {}
    found = {}
    for name, value in watched.attributes():
        if id(value) not in known:
            known[id(value)] = _attribute(value)
        found[name] = known[id(value)]
    return found


def _attribute(value: Any) -> Any:
    chain = [code_digest(one.__code__) for one in functions_in(value)]
    if chain:
        return [type(value).__name__, *chain]
    try:
        return described(value)
    except CannotDescribe:
        return type(value).__qualname__


def _is_of_a_version(code: CodeType) -> bool:
    """Whether code is torch's or Python's own."""
    file = code.co_filename
    is_pythons = file.startswith(_PYTHON) and not any(name in file for name in _PACKAGES)
    return is_pythons or file.startswith(("<frozen ", _TORCH))


def _index(module: ModuleType) -> dict[str, list[CodeType]]:
    """Return all code of a module's functions and classes by name, with what is defined inside of it."""
    found: dict[str, list[CodeType]] = {}
    seen: set[int] = set()

    def add(code: CodeType) -> None:
        if id(code) in seen:
            return
        seen.add(id(code))
        found.setdefault(code.co_qualname, []).append(code)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                add(constant)

    for function in _functions_of(vars(module), module.__name__, 0):
        add(function.__code__)
    return found


def _functions_of(space: Any, home: str, depth: int) -> Iterator[FunctionType]:
    for value in list(space.values()):
        if isinstance(value, type):
            if value.__module__ == home and depth < 4:
                yield from _functions_of(vars(value), home, depth + 1)
        else:
            yield from functions_in(value)
