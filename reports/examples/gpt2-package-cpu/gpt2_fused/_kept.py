"""Compiled kernels on disk: those that the package brought, and those that this user's processes compiled.

An exported package has a copy of this file. A name holds a digest of all that the machine code depends on, so that a file of that
name is right on every machine that asks for it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

INTO = "FUSED_KERNELS_INTO"
"""Environment variable: a folder in place of the user's cache, for what is compiled to be shipped."""


def digest(*parts: str) -> str:
    """Return a name's digest.

    Args:
        parts: source, options, versions, instruction set.
    """
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


class Binaries:
    """Where compiled kernels are.

    Args:
        shipped: folder that the package brought; it may be absent.
        package: name of the package, and of its folder in the user's cache.
    """

    def __init__(self, shipped: Path, package: str) -> None:
        self._shipped = shipped
        self._package = package

    def kept(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return the file of a name, compiled if there is none.

        Args:
            name: with a digest in it.
            make: writes the file to a path.
        """
        shipped = self._shipped / name
        return shipped if shipped.is_file() else self.own(name, make)

    def own(self, name: str, make: Callable[[Path], None], *, is_broken: bool = False) -> Path:
        """Return the file of a name in the user's cache, compiled if there is none.

        Args:
            name: with a digest in it.
            make: writes the file to a path.
            is_broken: whether a file that is there must be made again.
        """
        path = self.folder / name
        if is_broken or not path.is_file():
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=".new-") as folder:
                made = Path(folder) / name
                make(made)
                made.replace(path)  # another process may have been faster: both files are equal
        return path

    @functools.cached_property
    def folder(self) -> Path:
        """A folder of this user's that nobody else can write to."""
        if os.environ.get(INTO):
            return Path(os.environ[INTO])
        home = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(home) if home else Path.home() / ".cache") / self._package
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
            if not folder.is_symlink() and found.st_uid == os.getuid() and not found.st_mode & 0o022:
                return folder
        except OSError:
            pass
        return Path(tempfile.mkdtemp(prefix=f"{self._package}-"))

    def give_to_triton(self, cache: Path) -> int:
        """Copy what Triton had compiled into its cache of this machine; return how many kernels were added.

        Triton names a folder after source, options, versions and GPU. A group file in it lists its files by their whole paths.

        Args:
            cache: Triton's own folder.
        """
        added = 0
        for kernel in sorted((self._shipped / "triton").glob("*")):
            place = cache / kernel.name
            if place.exists() or not kernel.is_dir():
                continue
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as folder:
                made = Path(folder) / kernel.name
                shutil.copytree(kernel, made)
                for group in made.glob("__grp__*.json"):
                    listed = json.loads(group.read_text(encoding="utf-8"))
                    listed["child_paths"] = {name: str(place / name) for name in listed["child_paths"]}
                    group.write_text(json.dumps(listed), encoding="utf-8")
                try:
                    made.rename(place)
                except OSError:  # another process was faster
                    continue
            added += 1
        return added
