"""Tuned launch parameters on disk: one JSON file for a user, shared by all runs.

Written as a whole and renamed into place, under a lock, so that runs side by side lose nothing of each other. A file that cannot
be read is no reason to stop: the warning says so, and the next result replaces it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from fusion_advisor.codegen.common.interface import Tuning
from fusion_advisor.files.regular_file import read_regular
from fusion_advisor.records.serialize import write_atomic

SCHEMA = "fusion-advisor-tuning/1"
_LARGEST = 2**20
_Record = TypeVar("_Record")


def default_path() -> Path:
    """``$XDG_CACHE_HOME/fusion-advisor/tuning.json``."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "fusion-advisor" / "tuning.json"


class TuningStore:
    """Tunings by key.

    Args:
        path: the file; the user's own by default.
        warn: gets a sentence when the file cannot be read or written.
    """

    def __init__(self, path: Path | None = None, warn: Callable[[str], None] = lambda _: None) -> None:
        self.path = path or default_path()
        self._warn = warn

    def get(self, key: str) -> Tuning | None:
        """Return what was stored, or None."""
        return self.get_as(Tuning, key)

    def get_as(self, kind: type[_Record], key: str) -> _Record | None:
        """Return what was stored as a dataclass of numbers and names, or None."""
        entry = self._entries().get(key)
        if entry is None:
            return None
        tuning = _read(kind, entry)
        if tuning is None:
            self._warn(f"{self.path}: the entry of {key} is damaged and was ignored")
        return tuning

    def put(self, key: str, tuning: Any, *, median_ns: int, default_ns: int) -> None:
        """Store a dataclass of launch parameters, with its time and, for the reader, the time of the backend's own choice."""
        given = {name: value for name, value in asdict(tuning).items() if value}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_name(self.path.name + ".lock")):
                entries = self._entries()
                entries[key] = {"tuning": given, "median_ns": median_ns, "default_ns": default_ns}
                document = {"schema": SCHEMA, "entries": dict(sorted(entries.items()))}
                write_atomic(self.path, json.dumps(document, indent=1) + "\n")
        except OSError as error:
            self._warn(f"{self.path} cannot be written ({error.strerror or error}); this tuning will be measured again")

    def _entries(self) -> dict[str, Any]:
        try:
            document = json.loads(read_regular(self.path))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._warn(f"{self.path} cannot be read and was ignored: {str(error).splitlines()[0]}")
            return {}
        if not isinstance(document, dict) or document.get("schema") != SCHEMA or not isinstance(document.get("entries"), dict):
            self._warn(f"{self.path} is not a {SCHEMA} file and was ignored")
            return {}
        return dict(document["entries"])


def _read(kind: type[_Record], entry: object) -> _Record | None:
    given = entry.get("tuning") if isinstance(entry, dict) else None
    if not isinstance(given, dict):
        return None
    names = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if not set(given) <= set(names) or any(field.default is MISSING and name not in given for name, field in names.items()):
        return None
    for name, value in given.items():
        is_name = names[name].default is MISSING  # the one field without a default says which kernel it is
        if is_name != isinstance(value, str) or not (is_name or (type(value) is int and 0 < value <= _LARGEST)):
            return None
    return kind(**given)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # not POSIX: the rename alone keeps the file whole
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
