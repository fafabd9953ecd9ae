"""A comparison as markdown and as HTML: the same rows and sentences as in the terminal."""

from __future__ import annotations

import re

from fusion_advisor.report import compare as comparing
from fusion_advisor.report import gate, html, markdown

MAX_ROWS = 30
"""Changed rows of a table in markdown."""
MAX_FOLDED = 50
MAX_HTML_ROWS = 500


def render_compare_markdown(shown: comparing.Comparison, limit: int = markdown.LIMIT) -> str:
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


def render_compare_html(shown: comparing.Comparison) -> str:
    """Return the comparison as one page that loads nothing and runs nothing."""
    return html.render_still("compare.html.jinja", **_shared(shown), max_rows=MAX_HTML_ROWS)


def _shared(shown: comparing.Comparison) -> dict[str, object]:
    return {
        "shown": shown,
        "title": comparing.title(shown),
        "headline": comparing.headline(shown),
        "sides": [comparing.side_line("", side).strip() for side in (shown.a, shown.b)],
        "step": comparing.step_table(shown),
        "tables": comparing.change_tables(shown),
        "method": comparing.method_line(shown),
        "reproduce": comparing.reproduce_lines(shown),
        "gate_mark": gate.mark,
    }
