"""Output of ``fleet``: the ranking, where the time goes, and what could not be read."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.text import Text

from fusion_advisor.records.trace import FleetReport
from fusion_advisor.report.fleet import view
from fusion_advisor.report.terminal.layout import Column, column_table, plain

_FLEXIBLE = 18
_ROWS = 10
"""Rows of a table of groups."""


def fleet_table(report: FleetReport, console: Console) -> RenderableType:
    """Return the whole output."""
    lines: list[RenderableType] = [_line(view.headline(report), console, "bold")]
    lines += [_line(f"! {note}", console, "yellow") for note in view.notes(report)]
    for table in (view.chain_table(report), view.coverage_table(report), *view.group_tables(report), view.rank_table(report)):
        if not table.rows:
            continue
        shown = table.rows if table.is_code else table.rows[:_ROWS]
        lines += [Text(""), _line(table.title, console, "bold"), column_table(_columns(table, shown), console)]
        if table.note:
            lines.append(_line(table.note, console, "dim"))
        if len(table.rows) > len(shown):
            lines.append(_line(f"{len(table.rows) - len(shown)} more rows in fleet.html.", console, "dim"))
    if report.failed:
        lines += [Text(""), _line("Files that could not be ranked", console, "bold")]
        lines += [_line(f"{row[1]}  {row[2]}", console) for row in view.failed_table(report).rows[:5]]
    return Group(*lines)


def _columns(table: view.Table, rows: tuple[tuple[str, ...], ...]) -> list[Column]:
    columns = [Column(table.heads[0], tuple(row[0] for row in rows), flex_min=_FLEXIBLE)]
    for place, head in enumerate(table.heads[1:], start=1):
        is_last = place == len(table.heads) - 1
        columns.append(Column(head, tuple(row[place] for row in rows), is_right=True, drop=0 if is_last else 9 - place))
    return columns


def _line(text: str, console: Console, style: str = "") -> Text:
    return Text(plain(text, console), style=style, overflow="fold")
