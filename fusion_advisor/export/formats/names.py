"""Names of the formats, for the command line, which imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from fusion_advisor.errors import UsageError

PACKAGE, KERNELS, PT2, PATCH = "package", "kernels", "pt2", "patch"
FORMATS: Mapping[str, str] = {
    PACKAGE: "a Python package",
    KERNELS: "a repository for Hugging Face's kernels library",
    PT2: "an AOTInductor package, compiled ahead of time",
    PATCH: "a diff against the model's own source",
}
"""What each format is."""


def known_format(name: str, *, with_cache: bool = False) -> str:
    """Return the name of a format.

    Args:
        name: as the user gave it.
        with_cache: compiled kernels are asked for too.

    Raises:
        UsageError: there is no such format, or it has no place for compiled kernels.
    """
    if name not in FORMATS:
        *first, last = FORMATS
        raise UsageError(detail=f"export format `{name}` is not known", help=f"use {', '.join(first)} or {last}")
    if with_cache and name != PACKAGE:
        raise UsageError(
            detail=f"export format `{name}` ships no compiled kernels of its own",
            help="leave out --with-cache, or export a package",
        )
    return name
