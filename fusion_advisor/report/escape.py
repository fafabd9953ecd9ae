"""Text from a model made safe to show: names, paths and source lines may hold anything.

Escaping for HTML, markdown or a terminal is each view's own work; what is common is that a character that cannot be seen, or
that reorders, erases or colours what stands around it, is shown as its number instead of acting.
"""

from __future__ import annotations

import unicodedata

_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Control, formatting (bidirectional overrides among them), lone surrogates, private, unassigned, line separators."""


def visible(text: str, limit: int = 400) -> str:
    """Return one line of text in which every unseen character is spelled out, cut to ``limit`` with an ellipsis."""
    cut = text if len(text) <= limit else text[: max(0, limit - 1)] + "…"
    if cut.isascii() and cut.isprintable():
        return cut
    return "".join(_seen(char) for char in cut)


def visible_lines(source: str, max_lines: int, max_columns: int = 400) -> tuple[tuple[str, ...], int]:
    """Return the first lines of a source text, each safe to show, and how many lines were left out."""
    lines = source.replace("\r\n", "\n").rstrip("\n").split("\n")
    shown = tuple(visible(line.expandtabs(4), max_columns) for line in lines[:max_lines])
    return shown, len(lines) - len(shown)


def shortened(text: str, limit: int) -> str:
    """Return a text with an ellipsis in its middle where it is longer than ``limit``: generated names differ at their ends."""
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    return f"{text[: limit - 1 - tail]}…{text[len(text) - tail :]}"


def plural(count: int, one: str, many: str = "") -> str:
    """``1 site``, ``1,204 launches``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _seen(char: str) -> str:
    if char in "\n\t\r":
        return " "
    if unicodedata.category(char) not in _UNSEEN:
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
