"""How wide a piece of text is in a chart, so that labels are placed by measure: never cut, never one over another.

The advances are DejaVu Sans', the widest of the page's fonts, rounded up: text in any other font of the page takes less.
"""

from __future__ import annotations

import unicodedata

_ADVANCES = {
    0.41: "iIjlt.,:;'!|()[]/\\ frJ-\"",
    0.60: "cksvxyz",
    0.65: "abdeghnopqu0123456789$?_LEF+*→−–",
    0.73: "ABCKPRSTVXYZ",
    0.84: "wDGHNOQU&=<>≤≥±~^#…·×",
    1.00: "mMW@%µ▲√",
}
_ADVANCE = {character: advance for advance, characters in _ADVANCES.items() for character in characters}
_BOLD = 1.13
"""A semibold line is wider by this much."""


def text_width(text: str, size: float, *, is_bold: bool = False) -> float:
    """Return an upper bound of a text's width, in the unit of ``size`` (the font's size)."""
    ems = sum(_ADVANCE.get(one, 1.0 if unicodedata.east_asian_width(one) in "WF" else 0.8) for one in text)
    return ems * size * (_BOLD if is_bold else 1.0)


def fitted(text: str, width: float, size: float, *, is_bold: bool = False) -> str:
    """Return a text that is at most ``width`` wide, with an ellipsis in its middle where it was longer; empty where none fits."""
    if text_width(text, size, is_bold=is_bold) <= width:
        return text
    low, high = 0, len(text) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text_width(_shortened(text, middle), size, is_bold=is_bold) <= width else (low, middle - 1)
    return _shortened(text, low) if low >= 3 else ""


def _shortened(text: str, kept: int) -> str:
    tail = kept // 2
    return f"{text[: kept - tail]}…{text[len(text) - tail :] if tail else ''}"
