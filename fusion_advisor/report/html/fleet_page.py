"""A fleet's ranking as markdown, and as one HTML page that loads nothing and runs nothing."""

from __future__ import annotations

import re

from fusion_advisor.records.trace import FleetReport
from fusion_advisor.report import markdown
from fusion_advisor.report.fleet import view
from fusion_advisor.report.html import page as html

_BAR = 720
"""Width of the chart."""


def render_fleet_markdown(report: FleetReport, limit: int = markdown.LIMIT) -> str:
    """Return GitHub-flavoured markdown of at most ``limit`` characters."""
    template = markdown.environment().get_template("fleet.md.jinja")
    text = re.sub(r"\n{3,}", "\n\n", template.render(**_shared(report))).strip() + "\n"
    return text if len(text) <= limit else markdown.cut(text, limit)


def render_fleet_html(report: FleetReport) -> str:
    """Return the page."""
    return html.render_still("fleet.html.jinja", **_shared(report), bars=_bars(report), bar_width=_BAR)


def _shared(report: FleetReport) -> dict[str, object]:
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
