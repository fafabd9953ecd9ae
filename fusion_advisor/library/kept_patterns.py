"""The library's patterns on disk: references are traced once for a user, not in every process.

One JSON file holds the patterns of one kernel, in the private folder of ``files.private_folder`` and under a name with the digest
of its content (``files.kept_code``): what is damaged is removed, said in the log, and traced again. Nothing in it is executed.
The name also holds a digest of all that patterns depend on: the manifest, the reference, this package's sources, the versions of
torch and Python, and torch's modes that a trace follows.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fusion_advisor.content import package_digest
from fusion_advisor.errors import UnknownSchema, UnreadableReport
from fusion_advisor.files.kept_code import KeptCode
from fusion_advisor.files.private_folder import cache_folder
from fusion_advisor.files.regular_file import read_regular
from fusion_advisor.library.match import Pattern
from fusion_advisor.library.spec import KernelSpec
from fusion_advisor.records.serialize import dump_record, load_record

_log = logging.getLogger(__name__)
_SCHEMA = "fusion-advisor-patterns/1"
_SUFFIX = ".json"
_STALE_S = 30 * 86_400
"""Several versions of the package may share a user's cache; a version's files that are older than a month are removed."""
_IN_KEY = {"torch", "fusion_advisor", *sys.stdlib_module_names}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    patterns: tuple[Pattern, ...]


def kept_patterns(spec: KernelSpec, reference: bytes, *, of: str) -> tuple[Pattern, ...] | None:
    """Return the patterns that an earlier process traced; None where there are none.

    Args:
        spec: the kernel's manifest.
        reference: the content of its ``reference.py``.
        of: which of its example shapes, in a word.
    """
    try:
        store, key = _store(), _key(spec, reference, of)
        path = store.find(key)
        if path is None:
            return None
        try:
            return load_record(_Kept, read_regular(path), schema=_SCHEMA, name=str(path)).patterns
        except (UnreadableReport, UnknownSchema) as error:
            store.drop(path, str(error))
            return None
    except OSError as error:
        _log.warning("patterns of %s could not be read from the cache: %s", spec.name, error)
        return None


def keep_patterns(spec: KernelSpec, reference: bytes, patterns: tuple[Pattern, ...], *, of: str) -> None:
    """Keep patterns for later processes; those of other versions of the kernel's files or of this package go after a month.

    Nothing is kept of a reference that imports other modules than torch's, Python's and this package's: they are not in the key.

    Args:
        spec: the kernel's manifest.
        reference: the content of its ``reference.py``.
        patterns: traced from these two.
        of: which of its example shapes, in a word.
    """
    if not _is_self_contained(reference):
        return
    try:
        store = _store()
        path = store.keep_bytes(_key(spec, reference, of), dump_record(_Kept(patterns=patterns), _SCHEMA).encode())
        for older in store.folder.glob(f"{_stem(spec)}*{_SUFFIX}"):
            if older != path and older.lstat().st_mtime < path.lstat().st_mtime - _STALE_S:
                older.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("patterns of %s are not kept: %s", spec.name, error)


def _store() -> KeptCode:
    return KeptCode(folder=cache_folder("patterns"), suffix=_SUFFIX)


def _stem(spec: KernelSpec) -> str:
    return f"{spec.name}-"


def _key(spec: KernelSpec, reference: bytes, of: str) -> str:
    digest = hashlib.sha256()
    modes = (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
    for part in (
        package_digest(), f"{torch.__version__} {torch.version.git_version}", sys.version, repr(modes),
        repr(replace(spec, folder=Path())),
    ):  # fmt: skip
        digest.update(f"{len(part)}:{part}".encode())
    digest.update(reference)
    return f"{_stem(spec)}{of}-" + digest.hexdigest()[:32]


def _is_self_contained(reference: bytes) -> bool:
    """Whether a reference imports only modules whose versions are in the key."""
    names = set()
    for node in ast.walk(ast.parse(reference)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else node.module or "")
    return {name.partition(".")[0] for name in names} <= _IN_KEY
