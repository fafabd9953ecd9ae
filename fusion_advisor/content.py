"""Where the package and its content folders (kernels, templates, reports) lie, installed or in a checkout, and its version."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

_PACKAGE = Path(str(files("fusion_advisor")))


def content_dir(name: str) -> Path:
    """Return the folder ``kernels``, ``templates`` or ``reports`` of this installation."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def tool_version() -> str:
    """Return fusion-advisor's own version; in a checkout that was never installed, the one that its pyproject.toml names."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fusion-advisor")
    except PackageNotFoundError:
        return project_version(_PACKAGE.parent)


def project_version(root: Path) -> str:
    """Return the version in the pyproject.toml of a checkout; ``unknown`` where there is none.

    Args:
        root: of the checkout.
    """
    import tomllib

    project = root / "pyproject.toml"
    return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]) if project.is_file() else "unknown"


def package_sources() -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each Python file of the package, in a fixed order."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        yield path.relative_to(_PACKAGE).as_posix(), path.read_bytes()


@functools.cache
def package_digest() -> str:
    """Return a digest of the package's sources, so that no edit of the tracer or the lowering meets patterns from before it."""
    digest = hashlib.sha256()
    for name, content in package_sources():
        digest.update(f"{name}:{len(content)}:".encode() + content)
    return digest.hexdigest()
