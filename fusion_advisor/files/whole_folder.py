"""A folder that appears with all its files or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fusion_advisor.errors import CannotWrite, ExportExists


def write_folder(files: Mapping[str, bytes | Path], folder: Path, *, force: bool) -> None:
    """Write files beside a folder's place, then rename.

    Args:
        files: content by path inside of the folder; a path is of a file that is moved there.
        folder: that they make.
        force: replace what is there.

    Raises:
        ExportExists: the folder is there, and ``force`` was not given.
        CannotWrite: the file system refuses.
    """
    refuse_existing(folder, force=force)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.new-", dir=folder.parent))
        try:
            for name, content in files.items():
                path = made / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(content, Path):
                    shutil.move(content, path)
                else:
                    path.write_bytes(content)
            made.chmod(0o755)
            _put(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise CannotWrite(path=folder, detail=error.strerror or str(error)) from error


def _put(made: Path, folder: Path) -> None:
    """Give a folder its name; what had it before is kept until then, and put back where that fails."""
    old = made.with_name(f"{made.name}.old")
    if folder.exists():
        folder.rename(old)
    try:
        made.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def refuse_existing(folder: Path, *, force: bool) -> None:
    """Refuse a folder that is there, before a model is loaded for minutes.

    Args:
        folder: to be written.
        force: replace a folder; a file or a link is never replaced.

    Raises:
        ExportExists: it is there, and may not be replaced.
    """
    if folder.is_symlink() or (folder.exists() and (not force or not folder.is_dir())):
        raise ExportExists(path=folder)
