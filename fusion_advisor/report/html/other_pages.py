"""A comparison and a fleet's ranking as markdown, and as HTML pages that load nothing and run nothing."""

from __future__ import annotations

import re

from fusion_advisor.records.trace import FleetReport
from fusion_advisor.report import markdown
from fusion_advisor.report.compare import gate_rules, rows
from fusion_advisor.report.compare.comparison import Comparison
from fusion_advisor.report.fleet import view
from fusion_advisor.report.html import page as html

MAX_ROWS = 30
"""Changed rows of a comparison's table in markdown."""
MAX_FOLDED = 50
MAX_HTML_ROWS = 500
_BAR = 720
"""Width of the fleet's chart."""


def render_compare_markdown(shown: Comparison, limit: int = markdown.LIMIT) -> str:
    """Return the comparison as GitHub-flavoured markdown of at most ``limit`` characters."""
    text = ""
    for parts, max_rows in (({"unchanged"}, MAX_ROWS), (set[str](), MAX_ROWS), (set[str](), 5)):
        page = markdown.environment().get_template("compare.md.jinja")
        text = page.render(
            **_of_comparison(shown),
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
    return html.render_still("compare.html.jinja", **_of_comparison(shown), max_rows=MAX_HTML_ROWS)


def _of_comparison(shown: Comparison) -> dict[str, object]:
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


def render_fleet_markdown(report: FleetReport, limit: int = markdown.LIMIT) -> str:
    """Return GitHub-flavoured markdown of at most ``limit`` characters."""
    template = markdown.environment().get_template("fleet.md.jinja")
    text = re.sub(r"\n{3,}", "\n\n", template.render(**_of_fleet(report))).strip() + "\n"
    return text if len(text) <= limit else markdown.cut(text, limit)


def render_fleet_html(report: FleetReport) -> str:
    """Return the page."""
    return html.render_still("fleet.html.jinja", **_of_fleet(report), bars=_bars(report), bar_width=_BAR)


def _of_fleet(report: FleetReport) -> dict[str, object]:
    return {
        "report": report,
        "headline": view.headline(report),
        "notes": view.notes(report),
        "chains": view.chain_table(report),
        "proofs": [(chain, view.prove_lines(chain)) for chain in report.chains],
        "coverage": view.coverage_table(report),
        "groups": view.group_tables(report),
        "ranks": view.rank_table(report),
        "failed": view.failed_table(report),
        "method": view.METHOD,
        "hours": view.hours,
    }


def _bars(report: FleetReport) -> list[tuple[str, str, float]]:
    """Return (name, share, width) of the rows of the coverage chart."""
    most = max((share for _, share in report.coverage), default=1.0)
    return [(name, f"{share:.1%}", round(_BAR * 0.55 * share / most, 1)) for name, share in report.coverage]
