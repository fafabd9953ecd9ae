"""Warnings that point at the line which called the model: between it and us lie frames of torch's and our own."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

_OURS = f"{Path(__file__).parents[1]}/"
_INSIDE = (_OURS, f"{Path(torch.__file__).parent}/")
_ENTRY = "dispatch"
"""The fused model's method that its call runs. Frames above it may contain the model's own forward, which
did not call the model."""


def warn_caller(message: str) -> None:
    """Warn at the innermost line that is neither torch's nor ours, outside of the fused call if there is one.

    From Python 3.12 on ``skip_file_prefixes`` does the first half of that.

    Args:
        message: one sentence.
    """
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    entry = next((depth for depth, found in enumerate(frames) if _is_entry(found)), 0)
    level = next((depth for depth, found in enumerate(frames) if depth > entry and not _is_inside(found)), len(frames) - 1)
    warnings.warn(message, stacklevel=level + 1)


def _is_entry(frame: FrameType) -> bool:
    return frame.f_code.co_name == _ENTRY and frame.f_code.co_filename.startswith(_OURS)


def _is_inside(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_INSIDE)
