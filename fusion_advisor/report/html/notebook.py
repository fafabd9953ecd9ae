"""A report in a notebook: a short piece of HTML that shows it, and pandas frames of its rows.

The piece stands in someone else's page, light or dark: it takes that page's own colour, and says what is good or bad in words and
by a bar whose colours reach 3:1 on white and on black. It loads nothing and runs nothing, and everything of the model in it goes
through the report's own autoescaping environment.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from fusion_advisor.errors import UsageError
from fusion_advisor.records import Fusion, GraphRewrite, Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas

    from fusion_advisor.report import tables
    from fusion_advisor.report.terminal import layout

MAX_ROWS = 20
_MOST_WARNINGS = 5


class NotebookReport(Report):
    """A report that shows itself in a notebook or at a prompt, and gives its rows as pandas frames. See :func:`for_notebook`."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return what the terminal shows: the record's own text would hold the source of every kernel."""
        from fusion_advisor.report.terminal.result import as_text

        return as_text(self)

    def to_frame(self, name: str | None = None) -> pandas.DataFrame:
        """Return the report's rows as a pandas frame; whole numbers are ``Int64``, and NA is what was not measured.

        Args:
            name: ``rewrites``, ``chains``, ``sites``, ``kernels``, ``categories``, ``steps``, ``baselines`` or ``modules``; when
                left out, the table that the terminal prints: rewrites where any was tried, modules of a training step, else
                chains. Units are in the columns' names.

        Raises:
            UsageError: there is no such table.
        """
        return to_frame(self, name)

    def _repr_html_(self, *notes: str) -> str:
        """Return what Jupyter shows; ``notes`` are sentences that the report does not know."""
        return to_html(self, *notes)


def for_notebook(report: Report) -> NotebookReport:
    """Return the same report as one that a notebook can show."""
    return NotebookReport(**{field.name: getattr(report, field.name) for field in fields(report)})


def to_html(report: Report, *notes: str) -> str:
    """Return what Jupyter shows: the verdict, the step before and after, the result table, and why rewrites were removed.

    Args:
        report: any report.
        *notes: sentences that the report does not know, as whether the rewrites are in place now.
    """
    # What shows a report is loaded when one is shown: a saved plan that is put in place would wait 0.1 s for it.
    from fusion_advisor.report import baseline_rows, quality, shared_rows, tables
    from fusion_advisor.report.headline import headline
    from fusion_advisor.report.html.page import environment
    from fusion_advisor.report.terminal import result
    from fusion_advisor.report.training import rows as training

    tried: list[Fusion | GraphRewrite] = [*report.rewrites, *report.fusions]
    columns = sorted(result.result_columns(report), key=_place)
    count = len(columns[0].cells)
    shown: str = (
        environment()
        .get_template("notebook.html.jinja")
        .render(
            report=report,
            headline=headline(report),
            context=shared_rows.context_line(report),
            caveats=(*shared_rows.caveats(report), *quality.warnings(report)[:_MOST_WARNINGS]),
            notes=(*shared_rows.step_lines(report), *notes),
            comparisons=shared_rows.comparisons(report),
            caption="Modules" if training.is_profile(report) else "Rewrites" if tried else "Chains",
            columns=columns,
            rows=[[(column.cells[at], _tone(column, at)) for column in columns] for at in range(min(count, MAX_ROWS))],
            rows_left=max(0, count - MAX_ROWS),
            reasons=[(row.id, row.reason) for row in tried if row.reason][:MAX_ROWS],
            baselines=baseline_rows.baseline_rows(report),
            names=tables.NAMES,
        )
    )
    return shown


def to_frame(report: Report, name: str | None = None) -> pandas.DataFrame:
    """Return a table of a report as a pandas frame; see :meth:`NotebookReport.to_frame`."""
    import pandas

    from fusion_advisor.report import tables

    chosen = tables.result_name(report) if name is None else name
    if chosen not in tables.NAMES:
        raise UsageError(detail=f"a report has no table `{chosen}`", help=f"use one of {', '.join(tables.NAMES)}")
    table = tables.table(report, chosen)
    # column by column: pandas would make floats of whole nanoseconds wherever one of them is not measured
    cells = [[row[at] for row in table.rows] for at in range(len(table.columns))]
    return pandas.DataFrame(
        {name: pandas.Series(column, dtype=_dtype(column)) for name, column in zip(table.columns, cells, strict=True)}
    )


def _place(column: layout.Column) -> int:
    """The verdict follows the name directly, because a wide table scrolls and hides its last columns."""
    return 0 if column.head in ("ID", "#") else 1 if column.flex_min else 2 if column.head == "Verdict" else 3


def _tone(column: layout.Column, at: int) -> str:
    from fusion_advisor.report.terminal import layout

    style = column.cell_styles[at] if column.cell_styles else ""
    return next((tone for tone, colour in layout.TONES.items() if colour == style), "plain")


def _dtype(cells: Sequence[tables.Cell]) -> str:
    """Return pandas' type for a column: whole numbers stay whole, and what was not measured stays unknown."""
    kinds = {type(cell) for cell in cells if cell is not None}
    if kinds == {bool}:
        return "boolean"
    if kinds == {int}:
        return "Int64"
    return "float64" if kinds and kinds <= {int, float} else "object"
