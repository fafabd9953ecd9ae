"""A name that was read from a file, turned into a path inside one folder; a name is never a route."""

from __future__ import annotations

import re
from pathlib import Path

from fusion_advisor.errors import UnsafeName

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
_MOST_PARTS = 4
_RESERVED = frozenset({"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10))})
"""Devices under Windows, whatever follows the first dot."""


def path_inside(folder: Path, name: str) -> Path:
    """Return where ``name`` lies in ``folder``, which no link below it leads out of.

    Args:
        folder: any folder; it may itself be reached through a link.
        name: as a file gives it: at most four plain names with ``/`` between them.

    Raises:
        UnsafeName: the name is absolute, climbs, holds what a file name of ours never does, or passes a symbolic link.
    """
    refusal = why_unsafe(name)
    if refusal:
        raise UnsafeName(name=name[:200], folder=folder, detail=refusal)
    path = folder
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            raise UnsafeName(name=name, folder=folder, detail=f"`{path}` is a symbolic link")
    return path


def why_unsafe(name: str) -> str:
    """Say why a name from a file cannot name a file of a run; empty where it can."""
    parts = name.split("/")
    if len(parts) > _MOST_PARTS:
        return "it has too many parts"
    for part in parts:
        if not _PART.fullmatch(part):
            return "it is no plain file name: letters, digits, `_`, `.`, `+` and `-`, not empty, and no dot first"
        if part.partition(".")[0].lower() in _RESERVED or part.endswith("."):
            return f"`{part}` is a reserved name"
    return ""
