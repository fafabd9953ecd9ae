"""Where the package and its content folders (kernels, templates, reports) lie: installed, or in a checkout."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

_PACKAGE = Path(str(files("fusion_advisor")))


def content_dir(name: str) -> Path:
    """Return the folder ``kernels``, ``templates`` or ``reports`` of this installation."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def package_sources() -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each Python file of the package, in a fixed order."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        yield path.relative_to(_PACKAGE).as_posix(), path.read_bytes()
