"""Where machine code and traced patterns are kept between runs: in a folder that this user alone can change, or nowhere.

A library that is loaded runs its constructors at once. So whoever can put a file into the folder, or put another folder into its
place, runs code as this user. A folder is used only if it and its parent belong to this user and to nobody else, and if no folder
above can be changed by others. A sticky folder (``/tmp``) counts as one that cannot: others cannot rename what they do not own.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_home() -> Path:
    """``$XDG_CACHE_HOME``, or ``~/.cache``; a relative path counts as none: it would depend on the working directory."""
    asked = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if asked.is_absolute():
        return asked
    return Path(os.path.expanduser("~")) / ".cache"  # noqa: PTH111 - Path.home() raises where there is no home; this is relative


def cache_folder(kind: str) -> Path:
    """Return a private folder for one kind of file, and make it where it is missing.

    The first that can be trusted is taken: the user's cache, one under the temporary directory that later processes find again,
    one of this process alone, which is removed when the process ends. A folder that is passed over is named in the log, once.

    Args:
        kind: the folder's name, ``cpp``, ``cubin``, ``jinja`` or ``patterns``.

    Raises:
        OSError: no folder can be made at all.
    """
    home = cache_home()
    places = [home / "fusion-advisor"] if home.is_absolute() else []
    for root in (*places, Path(tempfile.gettempdir()) / f"fusion-advisor-{_user()}"):
        refusal = _make(root / kind)
        if not refusal:
            return root / kind
        _say_once(f"{root / kind} is not used as a cache: {refusal}")
    _say_once("compiled kernels and patterns are kept for this process alone")
    own = _of_this_process() / kind
    own.mkdir(exist_ok=True)
    return own


def why_not_private(folder: Path) -> str:
    """Say why others could change what lies in ``folder``; empty where they cannot.

    Args:
        folder: it and its parent must belong to this user; the folders above may belong to root.
    """
    if not hasattr(os, "geteuid"):  # Windows: a profile's folders are the user's own
        return ""
    try:
        for place in (folder, folder.parent):
            found = place.lstat()
            if not stat.S_ISDIR(found.st_mode):
                return f"{place} is a symbolic link" if stat.S_ISLNK(found.st_mode) else f"{place} is no folder"
            if found.st_uid != _user():
                return f"{place} belongs to user {found.st_uid}"
            if found.st_mode & _OTHERS_WRITE:
                return f"others may write into {place}; run `chmod 700 {place}`, and empty it if you do not trust them"
        for place in (above := folder.parent.parent.resolve(), *above.parents):
            found = place.stat()
            if found.st_uid not in (0, _user()):
                return f"{place} belongs to user {found.st_uid}"
            if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
                return f"others may rename what lies in {place}"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _make(folder: Path) -> str:
    """Make a folder and its parent for this user alone; return why they cannot be used, or nothing."""
    try:
        folder.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for place in (folder.parent, folder):
            place.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    refusal = why_not_private(folder)
    if not refusal:
        for place in (folder.parent, folder):
            if stat.S_IMODE(place.stat().st_mode) != stat.S_IRWXU:  # an older version left it readable
                place.chmod(stat.S_IRWXU)
    return refusal


@functools.cache
def _of_this_process() -> Path:
    folder, process = Path(tempfile.mkdtemp(prefix="fusion-advisor-")), os.getpid()

    def remove() -> None:
        if os.getpid() == process:  # a fork that ends must not take it from its parent
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


@functools.cache
def _say_once(text: str) -> None:
    _log.warning(text)


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0
