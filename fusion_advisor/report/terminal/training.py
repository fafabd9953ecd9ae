"""The ways to run a training step, for a terminal."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.text import Text

from fusion_advisor.records import Report
from fusion_advisor.report.terminal.layout import Column, fitted_table, text_line
from fusion_advisor.report.training import way_rows


def way_table(report: Report, console: Console) -> list[RenderableType]:
    """Return the table, why a way is missing in it, and what its figures are; empty where there is none.

    Args:
        report: of a training step.
        console: to fit.
    """
    table = way_rows.way_table(report)
    rows = table.rows
    if not rows:
        return []
    columns = [
        Column("Run as", tuple(row.name.replace("torch.compile", "compile") for row in rows), flex_min=23),
        Column("Step", tuple(row.step for row in rows), is_right=True),
        Column("+ AdamW", tuple(row.whole for row in rows), is_right=True),
        Column("95% CI", tuple(row.spread for row in rows), drop=5),
        Column("Against ours", tuple(row.against for row in rows), is_right=True, drop=1),
        Column(table.rate_word, tuple(row.rate for row in rows), is_right=True, drop=3),
        *([Column("MFU", tuple(row.mfu or "–" for row in rows), is_right=True, drop=4)] if any(row.mfu for row in rows) else []),
        Column("Peak", tuple(row.memory for row in rows), is_right=True, drop=2),
    ]
    absent = [row for row in report.baselines if row.step is None]
    lines = [f"{row.note}." if row.note.startswith(row.name) else f"{row.name}: {row.note}." for row in absent]
    lines += [f"{row.name}: {row.check}." for row in rows]
    return [
        fitted_table(columns, console),
        *(text_line(line, console, "dim") for line in lines),
        *(text_line(line, console) for line in table.lines),
        Text(""),
    ]
