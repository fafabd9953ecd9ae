"""Ranges of sizes in a terminal: a short table, for the page has the whole one."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.text import Text

from fusion_advisor.records import ShapeRanges
from fusion_advisor.report.escape import plural
from fusion_advisor.report.shapes import sentences
from fusion_advisor.report.shapes.padding import padding_cost, padding_lines
from fusion_advisor.report.shapes.rows import piece_rows, point_rows
from fusion_advisor.report.terminal.layout import TONES, Column, fitted_table, text_line

_MOST_ROWS = 5
_MOST_REFUSALS = 1
_MOST_PADDINGS = 2


def size_lines(shapes: ShapeRanges | None, console: Console) -> list[RenderableType]:
    """Return the points' speeds, how many there are besides, where the original ops run, and what is padded."""
    if shapes is None:
        return []
    rows, pieces = point_rows(shapes), piece_rows(shapes)
    shown, lines = rows[:_MOST_ROWS], list[RenderableType]()
    if shown:
        columns = [
            Column("Sizes", tuple(row.sizes for row in shown), flex_min=20),
            Column("Eager", tuple(row.eager for row in shown), is_right=True, drop=2),
            Column("Ours", tuple(row.ours for row in shown), is_right=True),
            Column("Speedup", tuple(row.speedup for row in shown), is_right=True),
            Column("95% CI", tuple(row.spread for row in shown), drop=1),
            Column("Piece", tuple(pieces[row.piece - 1].sizes for row in shown), drop=3),
            Column(
                "Result",
                tuple(f"{row.mark} {row.outcome}" for row in shown),
                cell_styles=tuple(TONES[row.tone] for row in shown),
            ),
        ]
        lines.append(fitted_table(columns, console))
    original, padding = sentences.left_to_original_ops(shapes), padding_lines(shapes)
    left = (
        (len(rows) - len(shown), "more point", "more points"),
        (len(original) - _MOST_REFUSALS, "more place with original ops", "more places with original ops"),
        (len(padding) - _MOST_PADDINGS, "more line on padding", "more lines on padding"),
    )
    more = ", ".join(plural(count, one, many) for count, one, many in left if count > 0)
    carried = sentences.carried_line(shapes)
    lines += [text_line(line, console, "dim") for line in (*original[:_MOST_REFUSALS], *([carried] if carried else []))]
    lines += [text_line(line, console, "dim") for line in (*padding[:_MOST_PADDINGS], padding_cost(shapes)) if line]
    lines += [text_line(f"{more} in the report.", console, "dim")] if more else []
    return [*lines, Text("")]
