"""Two runs side by side, and the verdicts of gates, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from fusion_advisor.records import Gate
from fusion_advisor.report.compare import gate_rules as gates
from fusion_advisor.report.compare import rows as compare_tables
from fusion_advisor.report.compare.comparison import Comparison
from fusion_advisor.report.escape import plural
from fusion_advisor.report.terminal.layout import TONES, Column, fitted_table, text_line

_MOST_CHANGES = 12


def compare_table(shown: Comparison, console: Console, *, is_whole: bool = False) -> RenderableType:
    """Return two runs side by side; what did not change is one line, unless ``is_whole``."""
    head = compare_tables.headline(shown)
    lines: list[RenderableType] = [
        text_line(compare_tables.side_line("A", shown.a), console),
        text_line(compare_tables.side_line("B", shown.b), console),
        *(text_line(f"! {caveat}", console, "yellow") for caveat in shown.caveats),
        Text(""),
        fitted_table(_compare_columns(compare_tables.step_table(shown).rows, "Step"), console),
    ]
    for table in compare_tables.change_tables(shown):
        rows = (*table.rows, *table.unchanged) if is_whole else table.rows[:_MOST_CHANGES]
        lines.append(Text(""))
        if rows:
            lines.append(fitted_table(_compare_columns(rows, table.title), console))
        else:
            lines.append(text_line(f"{table.title}: nothing changed.", console, "bold"))
        folded = [] if is_whole else [(len(table.rows) - len(rows), "smaller change"), (len(table.unchanged), "unchanged row")]
        words = ", ".join(plural(count, word) for count, word in folded if count)
        if words:
            lines.append(text_line(f"{words} not shown (-v shows all)", console, "dim"))
    lines += [Text(""), text_line(head.text, console, f"bold {TONES[head.tone]}".strip())]
    lines += [text_line(f"{point[0].upper()}{point[1:]}.", console) for point in head.points]
    lines.append(text_line(compare_tables.method_line(shown), console, "dim"))
    return Group(*lines, *gate_lines(shown.gates, console))


def gate_lines(judged: Sequence[Gate], console: Console) -> list[RenderableType]:
    """Return one line for each gate: sign, rule, figures."""
    styles = {"passed": "green", "failed": "red"}
    lines: list[RenderableType] = []
    for one in judged:
        line = text_line(f"{gates.mark(one)} gate {one.rule}: {one.reason}", console)
        line.stylize(styles.get(one.state, "yellow"), 0, 1)
        lines.append(line)
    return lines


def _compare_columns(rows: Sequence[compare_tables.Row], title: str) -> list[Column]:
    columns = [
        Column(title, tuple(row.name for row in rows), flex_min=20),
        Column("A", tuple(row.a for row in rows), is_right=True),
        Column("B", tuple(row.b for row in rows), is_right=True),
        Column("Change", tuple(row.change for row in rows), is_right=True, drop=1),
        Column("Range", tuple(row.spread for row in rows), drop=2),
        Column("Launches", tuple(row.launches for row in rows), is_right=True, drop=3),
        Column(
            "Verdict",
            tuple(f"{row.verdict.mark} {row.verdict.words}".strip() for row in rows),
            cell_styles=tuple(TONES[row.verdict.tone] for row in rows),
        ),
    ]
    return [column for column in columns if not column.drop or any(column.cells)]
