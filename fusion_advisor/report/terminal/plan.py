"""Output of ``fusion-advisor plan``: chains with their kernels, other rewrites, and the bounds of the step."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.text import Text

from fusion_advisor import units
from fusion_advisor.records import PlanPreview
from fusion_advisor.report import plan_view
from fusion_advisor.report.escape import visible
from fusion_advisor.report.terminal.layout import Column, column_table, plain


def plan_table(plan: PlanPreview, console: Console) -> RenderableType:
    """Return the plan as tables, the reasons against a kernel as sentences below."""
    lines: list[RenderableType] = [_line(plan_view.context(plan), console, "bold")]
    lines += [_line(f"! {warning}", console, "yellow") for warning in plan_view.warnings(plan)]
    if plan.chains:
        lines += [column_table(_chain_columns(plan), console), _line(plan_view.BOUND, console, "dim")]
        lines += [_line(f"{row.chain.id}  {plan_view.kernel(row)}", console, "dim") for row in plan.chains if not row.fusion]
    if plan.candidates:
        lines += [Text(""), column_table(_candidate_columns(plan), console)]
    sentences = [plan_view.limits(plan), plan_view.summary(plan)]
    lines += [Text(""), *(_line(sentence, console) for sentence in sentences if sentence)]
    return Group(*lines)


def _chain_columns(plan: PlanPreview) -> list[Column]:
    rows = plan.chains
    names = tuple(visible(getattr(row.answer, "kernel", ""), 28) or f"none ({getattr(row.answer, 'code', '')})" for row in rows)
    return [
        Column("ID", tuple(row.fusion or row.chain.id for row in rows), "cyan"),
        Column("Chain", tuple(" → ".join(row.chain.ops) for row in rows), flex_min=16),
        Column("Sites", tuple(units.number(len(row.chain.sites)) for row in rows), is_right=True, drop=2),
        Column("Kernels", tuple(f"{row.chain.launches}→{row.launches_after}" for row in rows), is_right=True, drop=3),
        Column("Share", tuple(units.share(row.chain.share) for row in rows), is_right=True, drop=1),
        Column("Saves", tuple(plan_view.saving(row) for row in rows), is_right=True),
        Column("Kernel", names, cell_styles=tuple("cyan" if row.fusion else "dim" for row in rows)),
    ]


def _candidate_columns(plan: PlanPreview) -> list[Column]:
    rows = plan.candidates
    return [
        Column("Rewrite without a kernel of the library", tuple(row.title for row in rows), flex_min=20),
        Column("Sites", tuple(f"≤{units.number(row.sites)}" for row in rows), is_right=True),
    ]


def _line(text: str, console: Console, style: str = "") -> Text:
    return Text(plain(text, console), style=style, overflow="fold")
