"""One eager call of the model, watched where statements begin: the values that they read, and the module that they run in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from fusion_advisor.export.patch.statements import Statements
from fusion_advisor.workload.load import LoadedWorkload


@dataclass(frozen=True, slots=True)
class Watched:
    """Statements to watch for.

    Attributes:
        file: that they are in.
        statements: of a function of the file.
        module: path of the module that the watched call is for; a module of torch's own runs in its parent's call.
    """

    file: str
    statements: Statements
    module: str


@dataclass(frozen=True, slots=True)
class Observed:
    """Values when the statements began.

    Attributes:
        values: of the local names that they read.
        owner: the module whose code they are.
        module: its path.
        namespace: the function's globals.
    """

    values: Mapping[str, Any]
    owner: nn.Module
    module: str
    namespace: Mapping[str, Any]


def observe(loaded: LoadedWorkload, watched: Mapping[int, Watched]) -> dict[int, Observed]:
    """Make the workload's call once and return what was seen first at each place; a place that no call came to is absent.

    Args:
        loaded: the model, as it is, and its call.
        watched: the places, by keys of the caller's.
    """
    found: dict[int, Observed] = {}
    paths = {(path, id(module)) for path, module in loaded.model.named_modules(remove_duplicate=False)}
    by_line: dict[tuple[str, int], list[int]] = {}
    for key, one in watched.items():
        by_line.setdefault((one.file, one.statements.first_line), []).append(key)
    files = {file: str(Path(file)) for file, _ in by_line}
    names = {(one.file, one.statements.function.name) for one in watched.values()}

    def line(frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        if event == "line":
            for key in by_line.get((frame.f_code.co_filename, frame.f_lineno), ()):
                one = watched[key]
                owner = _module_of(frame)
                path = next((path for path in _upwards(one.module) if (path, id(owner)) in paths), None)
                if key not in found and owner is not None and path is not None:
                    local = frame.f_locals
                    values = {name: local[name] for name in one.statements.reads if name in local}
                    found[key] = Observed(values, owner, path, frame.f_globals)
        return line

    def call(frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        return line if event == "call" and (files.get(code.co_filename), code.co_name) in names else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        with torch.no_grad():
            loaded.model(*loaded.args, **loaded.kwargs)
    finally:
        sys.settrace(before)
    return found


def _upwards(path: str) -> list[str]:
    """Return a path and the paths of all modules around it, the innermost first."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _module_of(frame: FrameType) -> nn.Module | None:
    """Return the module whose code a call belongs to: its own ``self``, or the nearest caller's."""
    at: FrameType | None = frame
    while at is not None:
        found = at.f_locals.get("self")
        if isinstance(found, nn.Module):
            return found
        at = at.f_back
    return None
