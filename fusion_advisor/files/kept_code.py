"""Compiled kernels in files that carry their own digest: a file is read whole and compared before anything loads it.

``dlopen`` maps a file and trusts it: a truncated library ends the process with SIGBUS, one of zeros with SIGSEGV, and an empty
one would disable its kernel for as long as it lies there. So the digest of what was built is part of the file's name, and a file
that does not match is removed, said in the log, and built again.

Between the check and the load nobody but this user can change the file (:mod:`fusion_advisor.files.private_folder`), and we
write by renaming alone, so a file that was checked stays what it was. To load through ``/proc/self/fd`` would not help: the
loader takes a second library of one name for the first, and descriptors are used again.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)
_DIGITS = 32
_STALE_S = 86_400
"""A temporary file of a process that was killed is removed after a day: no compiler works for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCode:
    """The files of one kind in one folder; processes may share it."""

    folder: Path
    suffix: str

    def find(self, key: str) -> Path | None:
        """Return the file that was kept under ``key`` and is whole, or None; what is damaged is removed.

        Raises:
            OSError: a damaged file cannot be removed.
        """
        for path in sorted(self.folder.glob(f"{glob.escape(key)}.*{self.suffix}")):
            digest = path.name.removeprefix(f"{key}.").removesuffix(self.suffix)
            damage = _damage(path, digest)
            if not damage:
                return path
            self.drop(path, damage)
        return None

    def keep(self, key: str, made: Path) -> Path:
        """Move a file that was just built into its place, and return the place.

        Args:
            key: all that the file depends on.
            made: in the same folder, from :meth:`temporary`.

        Raises:
            OSError: the folder does not take it.
        """
        digest = hashlib.sha256(made.read_bytes()).hexdigest()[:_DIGITS]
        path = self.folder / f"{key}.{digest}{self.suffix}"
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        made.replace(path)  # not synced to the disk: after a power cut the digest tells
        return path

    def keep_bytes(self, key: str, content: bytes) -> Path:
        """As :meth:`keep`, of a file that is not written yet."""
        made = self.temporary()
        try:
            made.write_bytes(content)
            return self.keep(key, made)
        finally:
            made.unlink(missing_ok=True)

    def drop(self, path: Path, why: str) -> None:
        """Remove a file, so that it is built again, and say so in the log."""
        _log.warning("%s is damaged (%s) and is built again", path, why)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def temporary(self) -> Path:
        """Make an empty file to build into; those of processes that were killed are removed."""
        for left in self.folder.glob(f".*{self.suffix}"):
            with contextlib.suppress(FileNotFoundError):  # another process is quicker
                if time.time() - left.lstat().st_mtime > _STALE_S:
                    left.unlink()
        descriptor, name = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=self.suffix)
        os.close(descriptor)
        return Path(name)


def _damage(path: Path, digest: str) -> str:
    """Say what is wrong with a file whose first digits of SHA-256 should be ``digest``; empty where nothing is."""
    try:
        # No link is followed, and a pipe does not make the open wait.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return "it is no file"
            found = hashlib.file_digest(file, "sha256").hexdigest()[:_DIGITS]
    except OSError as error:
        return error.strerror or str(error)
    return "" if found == digest else "its content is not what was built"
