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


def known_format(name: str) -> str:
    """Return the name of a format.

    Args:
        name: as the user gave it.

    Raises:
        UsageError: there is no such format.
    """
    if name not in FORMATS:
        *first, last = FORMATS
        raise UsageError(detail=f"export format `{name}` is not known", help=f"use {', '.join(first)} or {last}")
    return name
