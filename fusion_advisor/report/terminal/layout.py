"""Tables laid out for a terminal: widths are computed here, so that nothing is squeezed to ``c…``.

One column flexes, the others are as wide as their content. Where the terminal is too narrow, columns are dropped in a fixed
order. Dynamic text goes through :class:`rich.text.Text`, never through markup: ``[/]`` in a name would raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.text import Text

from fusion_advisor import units
from fusion_advisor.report.escape import visible

TONES = {"gain": "green", "loss": "red", "warn": "yellow", "plain": ""}
_GAP = 2


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    head: str
    cells: tuple[str, ...]
    style: str = ""
    is_right: bool = False
    drop: int = 0
    """Columns with the largest number go first; 0 stays."""
    flex_min: int = 0
    """Above 0: the column that gives way, and how narrow it may get before others are dropped."""
    cell_styles: tuple[str, ...] = ()


def text_line(text: str, console: Console, style: str = "") -> Text:
    """Return a line of text that is safe for the console and folds at its edge."""
    return Text(plain(text, console), style=style, overflow="fold")


def plain(text: str, console: Console) -> str:
    """Return text safe for this console: unseen characters spelled, and signs in ASCII where it needs that."""
    shown = visible(text, 360)
    return units.ascii_only(shown) if is_ascii(console) else shown


def is_ascii(console: Console) -> bool:
    """Whether a console's stream can show only ASCII."""
    return not (console.encoding or "").lower().replace("-", "").startswith("utf")


def fitted_table(columns: list[Column], console: Console) -> Text:
    """Lay columns out for the console's width; every line is at most that wide, and what is cut ends in an ellipsis.

    Where even the columns that stay are too wide, each row takes two lines: up to the column that flexes, and the rest below.
    """
    shown = [_prepared(column, console) for column in columns]
    width = console.width
    while _needed(shown) > width:
        droppable = [column for column in shown if column.drop]
        if not droppable:
            break
        shown.remove(max(droppable, key=lambda column: column.drop))
    head = next(at for at, column in enumerate(shown) if column.flex_min) + 1
    if _needed(shown) <= width or head == len(shown):
        lines = _laid_out(shown, width, console)
    else:
        below = _laid_out(shown[head:], width - _GAP, console)
        pairs = zip(_laid_out(shown[:head], width, console), below, strict=True)
        lines = [line for name, rest in pairs for line in (name, Text(" " * _GAP).append_text(rest))]
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _laid_out(columns: list[Column], width: int, console: Console) -> list[Text]:
    """The lines of a table, its heads first; where it is too wide, what flexes gives way first and then the widest columns."""
    widths = [max(cell_len(text) for text in (column.head, *column.cells)) for column in columns]
    gaps = _GAP * (len(columns) - 1)
    for at in [at for at, column in enumerate(columns) if column.flex_min]:
        widths[at] = min(widths[at], max(4, widths[at] + width - sum(widths) - gaps))
    while sum(widths) + gaps > width and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    shown = [_cut(column.cells, wide, console) for column, wide in zip(columns, widths, strict=True)]
    lines = []
    for row in range(-1, len(columns[0].cells)):
        line = Text()
        for at, column in enumerate(columns):
            text = column.head if row < 0 else shown[at][row]
            style = "bold" if row < 0 else column.cell_styles[row] if column.cell_styles else column.style
            is_last = at == len(columns) - 1
            line.append(_fitted(text, widths[at], console, is_right=column.is_right, is_last=is_last), style=style)
            line.append("" if is_last else " " * _GAP)
        lines.append(line)
    return lines


def _cut(cells: Sequence[str], width: int, console: Console) -> list[str]:
    """Move the cut of cells that would read the same: two titles with the same beginning keep the words in which they differ."""
    dots = ".." if is_ascii(console) else "…"
    room = width - len(dots)
    shown = list(cells)
    for at, cell in enumerate(cells):
        if cell_len(cell) <= width or room < 8:
            continue
        twins = [other for other in cells if other != cell and set_cell_size(other, room) == set_cell_size(cell, room)]
        if twins:
            same = max(_common_start(cell, other) for other in twins)
            words = cell[:same].rfind(" ") + 1
            head = set_cell_size(cell, room // 3).rstrip()
            shown[at] = f"{head}{dots}{cell[max(words, same - room // 3) :]}"
    return shown


def _common_start(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def _prepared(column: Column, console: Console) -> Column:
    cells = tuple(plain(text, console)[:400] for text in column.cells)
    return Column(
        plain(column.head, console), cells, column.style, column.is_right, column.drop, column.flex_min, column.cell_styles
    )


def _needed(columns: list[Column]) -> int:
    widths = []
    for column in columns:
        widest = max(cell_len(text) for text in (column.head, *column.cells))
        widths.append(min(widest, column.flex_min) if column.flex_min else widest)
    return sum(widths) + _GAP * (len(columns) - 1)


def _fitted(text: str, width: int, console: Console, *, is_right: bool, is_last: bool) -> str:
    if cell_len(text) > width:
        dots = ".." if is_ascii(console) else "…"
        return set_cell_size(text, max(0, width - len(dots))) + dots[:width]
    if is_right:
        return " " * (width - cell_len(text)) + text
    return text if is_last else set_cell_size(text, width)


def column_table(columns: Sequence[Column], console: Console) -> Text:
    """Return columns, one of which flexes, laid out for the console's width."""
    return fitted_table(list(columns), console)


def simple_table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], console: Console) -> RenderableType:
    """Return plain rows whose last column gives way."""
    columns = [Column(head, tuple(row[at] for row in rows)) for at, head in enumerate(heads)]
    last = columns[-1]
    columns[-1] = Column(last.head, last.cells, flex_min=max(12, len(last.head)))
    return fitted_table(columns, console)
