"""The rows of a run on several ranks, in a terminal."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.text import Text

from fusion_advisor.report.ranks.rows import RanksView
from fusion_advisor.report.terminal.layout import Column, fitted_table, text_line


def rank_lines(view: RanksView | None, console: Console) -> list[RenderableType]:
    """Return a table with a row for each rank; empty where there was one process.

    Args:
        view: of the ranks.
        console: whose width counts.
    """
    if view is None:
        return []
    cells = list(zip(*view.rows, strict=True))
    columns = [
        Column(head, tuple(column), is_right=number > 1, flex_min=8 if head == "Device" else 0)
        for number, (head, column) in enumerate(zip(view.heads, cells, strict=True))
    ]
    table = fitted_table(columns, console)
    return [text_line(view.summary, console), table, text_line(view.note, console, "dim"), Text("")]
