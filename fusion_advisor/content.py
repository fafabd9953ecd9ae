"""Where the content folders (kernels, templates, reports) lie: inside an installed package, or next to it in a checkout."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

_PACKAGE = Path(str(files("fusion_advisor")))


def content_dir(name: str) -> Path:
    """Return the folder ``kernels``, ``templates`` or ``reports`` of this installation."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
