"""A comparison as markdown and as HTML: the same rows and sentences as in the terminal."""

from __future__ import annotations

import re

from fusion_advisor.report import markdown
from fusion_advisor.report.compare import gate_rules, rows
from fusion_advisor.report.compare.comparison import Comparison
from fusion_advisor.report.html import page as html

MAX_ROWS = 30
"""Changed rows of a table in markdown."""
MAX_FOLDED = 50
MAX_HTML_ROWS = 500


def render_compare_markdown(shown: Comparison, limit: int = markdown.LIMIT) -> str:
    """Return the comparison as GitHub-flavoured markdown of at most ``limit`` characters."""
    text = ""
    for parts, max_rows in (({"unchanged"}, MAX_ROWS), (set[str](), MAX_ROWS), (set[str](), 5)):
        page = markdown.environment().get_template("compare.md.jinja")
        text = page.render(
            **_shared(shown),
            parts=parts,
            max_rows=max_rows,
            max_folded=MAX_FOLDED,
            is_cut=not parts,
        )
        text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
        if len(text) <= limit:
            break
    return text if len(text) <= limit else markdown.cut(text, limit)


def render_compare_html(shown: Comparison) -> str:
    """Return the comparison as one page that loads nothing and runs nothing."""
    return html.render_still("compare.html.jinja", **_shared(shown), max_rows=MAX_HTML_ROWS)


def _shared(shown: Comparison) -> dict[str, object]:
    return {
        "shown": shown,
        "title": rows.title(shown),
        "headline": rows.headline(shown),
        "sides": [rows.side_line("", side).strip() for side in (shown.a, shown.b)],
        "step": rows.step_table(shown),
        "tables": rows.change_tables(shown),
        "method": rows.method_line(shown),
        "reproduce": rows.reproduce_lines(shown),
        "gate_mark": gate_rules.mark,
    }
