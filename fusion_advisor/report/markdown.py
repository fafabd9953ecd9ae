"""The markdown report: fits a pull request's comment, and reads there as it does here.

GitHub refuses a comment above 65,536 characters as a whole, so the text is cut by dropping whole parts in a fixed order: source,
then kernels, then environment, then what was removed or not matched. Inline SVG, styles and classes are stripped there, so there
are none.
"""

from __future__ import annotations

import re

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fusion_advisor import units
from fusion_advisor.content import content_dir
from fusion_advisor.records import Report, Status
from fusion_advisor.report import background_rows, baseline_rows, first_screen, kernel_rows, quality, shared_rows, waterfall_rows
from fusion_advisor.report.escape import plural, visible, visible_lines
from fusion_advisor.report.headline import headline
from fusion_advisor.report.ranks.rows import ranks_view
from fusion_advisor.report.shapes.view import sizes_view
from fusion_advisor.report.training import rows as training
from fusion_advisor.report.training.way_rows import way_table

LIMIT = 60_000
MAX_ROWS = 10
MAX_KERNELS = 20
MAX_SOURCE_LINES = 120
_CUTS = ("source", "kernels", "environment", "removed", "sizes", "quality")
"""Parts in the order in which they are given up."""

_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~])")
_BLANK = "\x00"
"""Stands for an empty line of source until the template's own empty lines are thinned out; no shown text can hold it."""


def render_markdown(report: Report, limit: int = LIMIT) -> str:
    """Return the report as GitHub-flavoured markdown of at most ``limit`` characters."""
    text = ""
    for given_up in range(len(_CUTS) + 1):
        text = _render(report, frozenset(_CUTS[given_up:]), is_cut=given_up > 0)
        if len(text) <= limit:
            return text
    return cut(text, limit)


def cut(text: str, limit: int) -> str:
    """Return the first whole lines of a text that is too long, outside any code block, and a last line that says so."""
    tail = "\n\n_cut; the full report is in `report.html`_\n"
    head = text[: max(0, limit - len(tail))]
    if "\n" not in head:
        return head[:limit]
    head = head[: head.rfind("\n")]
    fences = [found.start() for found in re.finditer(r"^```", head, re.MULTILINE)]
    return (head[: fences[-1]].rstrip() if len(fences) % 2 else head) + tail


def sticky_key(report: Report) -> str:
    """Name what was run where, without when: the next run of the same finds its own comment by it and writes over it."""
    work = report.workload
    parts = (work.model_id, work.dtype, f"{work.batch}x{work.seq_len}", work.phase, report.environment.device_name)
    return _key("-".join(part for part in parts if part)).lower()


def escape(text: str, limit: int = 200) -> str:
    """Return text that markdown shows as it is: nothing in it formats, links, mentions or starts a row."""
    escaped = _SPECIAL.sub(r"\\\1", visible(text, limit))
    return (
        escaped.replace("@", "@\u200b")
        .replace("\\#", "\\#\u200b")
        .replace("://", ":\u200b//")
        .replace("www.", "www\u200b.")
        .replace("&", "&amp;")
    )


def code_span(text: str, limit: int = 80) -> str:
    """Return text as a code span, whole even where it holds backticks, and safe inside a table."""
    shown = visible(text, limit).strip() or " "
    runs = [len(run) for run in re.findall(r"`+", shown)]
    fence = "`" * (max(runs, default=0) + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}".replace("|", "\\|")


def fenced(source: str, language: str) -> str:
    """Return source as a fenced block whose fence is longer than any run of backticks inside."""
    lines, left_out = visible_lines(source, MAX_SOURCE_LINES, 200)
    body = "\n".join(line or _BLANK for line in lines)
    fence = "`" * max(3, max((len(run) for run in re.findall(r"`+", body)), default=0) + 1)
    more = f"\n\n{plural(left_out, 'more line')} in the run directory." if left_out else ""
    return f"{fence}{language}\n{body}\n{fence}{more}"


def _render(report: Report, parts: frozenset[str], *, is_cut: bool) -> str:
    rows, kernels_left, _ = kernel_rows.kernel_rows(report, MAX_KERNELS)
    with_kernel = [chain for chain in report.chains if shared_rows.kernel_cell(report, chain)[0]]
    without = [
        (chain, shared_rows.kernel_cell(report, chain)[1])
        for chain in report.chains
        if not shared_rows.kernel_cell(report, chain)[0]
    ]
    removed = [fusion for fusion in report.fusions if fusion.status is not Status.KEPT]
    # What a rewrite that was timed has gained stands in its row; of the others it does not say why.
    untimed = [row for row in report.rewrites if row.status is not Status.KEPT and row.step_delta_ns is None]
    text = (
        environment()
        .get_template("report.md.jinja")
        .render(
            report=report,
            headline=headline(report),
            generation=shared_rows.step_lines(report),
            modules=training.module_rows(report, MAX_ROWS),
            caveats=shared_rows.caveats(report),
            context=shared_rows.context_line(report),
            device=shared_rows.device_word(report),
            quality=quality.verdict(report),
            findings=shared_rows.finding_lines(report),
            sentence=first_screen.sentence,
            next_steps=first_screen.next_steps(report),
            sum_line=waterfall_rows.sum_line(report),
            is_unchanged=shared_rows.is_unchanged(report),
            comparisons=shared_rows.comparisons(report),
            launch_line=shared_rows.launch_line(report),
            sticky_key=sticky_key(report),
            baselines=baseline_rows.baseline_rows(report),
            has_rested=baseline_rows.has_rested(report),
            training_ways=way_table(report),
            run_lines=baseline_rows.run_lines(report),
            predicted=baseline_rows.predicted,
            predicted_interval=baseline_rows.predicted_interval,
            sizes=sizes_view(report.shapes) if report.shapes else None,
            ranks=ranks_view(report.ranks),
            max_rows=MAX_ROWS,
            fusions=report.fusions[:MAX_ROWS],
            fusions_left=len(report.fusions[MAX_ROWS:]),
            chains=(with_kernel or list(report.chains))[:MAX_ROWS],
            kernel_cell={chain.id: shared_rows.kernel_cell(report, chain) for chain in report.chains},
            bits=[(fusion.id, line) for fusion in report.fusions[:MAX_ROWS] if (line := kernel_rows.bits_line(report, fusion))],
            special=[(fusion.id, line) for fusion in report.fusions[:MAX_ROWS] if (line := kernel_rows.special_line(fusion))],
            removed=removed[:100],
            untimed=untimed[:100],
            without=without[:100],
            without_left=len(without[100:]),
            verdicts=shared_rows.VERDICTS,
            kernels=rows,
            kernels_left=kernels_left,
            environment_rows=background_rows.environment_rows(report),
            parts=parts,
            is_cut=is_cut,
        )
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip().replace(_BLANK, "") + "\n"


def environment() -> Environment:
    """Return the jinja environment of the markdown templates."""
    # markdown is not HTML: escaping is by its own rules, through the filters below
    made = Environment(
        loader=FileSystemLoader(content_dir("reports") / "markdown"),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals.update(u=units, plural=plural)
    made.filters.update(md=escape, code=code_span, fenced=fenced, key=_key)
    return made


def _key(text: str) -> str:
    """Return what may stand in an HTML comment: a bot finds its own comment by it."""
    return re.sub(r"-{2,}", "-", re.sub(r"[^A-Za-z0-9._/-]+", "-", text))[:120].strip("-")
