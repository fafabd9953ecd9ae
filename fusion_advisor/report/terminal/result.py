"""Results of a run for a terminal: chains of a profile, rewrites of an apply, other ways to run the step."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from fusion_advisor import units
from fusion_advisor.records import Chain, Fusion, GraphRewrite, Match, Report, Site, Training
from fusion_advisor.report import baseline_rows, clocks, first_screen, kernel_rows, quality, shared_rows, waterfall_rows
from fusion_advisor.report.escape import plural, visible, visible_lines
from fusion_advisor.report.headline import headline, kept_count
from fusion_advisor.report.ranks.rows import ranks_view
from fusion_advisor.report.terminal.compare import gate_lines
from fusion_advisor.report.terminal.layout import TONES, Column, fitted_table, is_ascii, text_line
from fusion_advisor.report.terminal.ranks import rank_lines
from fusion_advisor.report.terminal.sizes import size_lines
from fusion_advisor.report.terminal.training import way_table
from fusion_advisor.report.training import rows as training

_MOST_WARNINGS = 5
_MOST_ROWS = 15
_MOST_SITES = 8
_MOST_LINES = 200


def profile_table(report: Report, console: Console) -> RenderableType:
    """Return the chains of a profile, the sum below them, and what limits the figures."""
    lines = [*_caveats(report, console)]
    if report.training is not None and training.is_profile(report):
        return Group(*lines, *_training(report, report.training, console), text_line(headline(report).text, console))
    table = fitted_table(_chain_columns(report), console) if report.chains else Text("")
    if report.chains:
        lines.append(table)
    lines.append(text_line(headline(report).text, console))
    if "Save" in table.plain.partition("\n")[0]:  # a narrow terminal drops the column
        lines.append(text_line("Save is an upper bound; bounds of different chains do not add up.", console, "dim"))
    return Group(*lines, *rank_lines(ranks_view(report.ranks), console), *_launches(report, console), *_findings(report, console))


def _training(report: Report, parts: Training, console: Console) -> list[RenderableType]:
    """Modules and kernels of a training step."""
    kernels, total = report.before.kernels[:_MOST_ROWS], max(report.before.device_ns, 1)
    columns = [
        Column("Kernel", tuple(name for name, _, _, _ in kernels), flex_min=16),
        Column("Category", tuple(category for _, category, _, _ in kernels), drop=1),
        Column("Count", tuple(units.number(count) for _, _, count, _ in kernels), is_right=True),
        Column(f"{shared_rows.device_word(report)} ms", tuple(units.milliseconds(ns) for _, _, _, ns in kernels), is_right=True),
        Column("Share", tuple(units.share(ns / total) for _, _, _, ns in kernels), is_right=True),
    ]
    left = [(len(parts.modules) - _MOST_ROWS, "module"), (len(report.before.kernels) - _MOST_ROWS, "kernel")]
    words = ", ".join(plural(count, f"more {what}") for count, what in left if count > 0)
    more = [text_line(f"{words} in the report.", console, "dim")] if words else []
    return [fitted_table(_module_columns(report, _MOST_ROWS), console), Text(""), fitted_table(columns, console), *more, Text("")]


def _module_columns(report: Report, limit: int) -> list[Column]:
    rows = training.module_rows(report, limit)
    return [
        Column("Module", tuple(row[0] for row in rows), flex_min=16),
        Column("Modules", tuple(row[1] for row in rows), is_right=True, drop=2),
        Column("Kernels", tuple(row[2] for row in rows), is_right=True, drop=1),
        Column("Forward", tuple(row[3] for row in rows), is_right=True),
        Column("Backward", tuple(row[4] for row in rows), is_right=True),
        Column("Share", tuple(row[5] for row in rows), is_right=True),
    ]


def apply_table(report: Report, console: Console) -> RenderableType:
    """Return each rewrite's gain, the other ways to run the step, what limits the figures, and last the verdict."""
    lines = [*_context(report, console)]
    if report.fusions or report.rewrites:
        lines += [fitted_table(_fusion_columns(report), console), Text("")]
    else:
        why = "no chain had a kernel" if report.chains else "no chain was ranked"
        why = "the run was interrupted before" if report.status == "interrupted" else why
        lines.append(text_line(f"No rewrite was tried: {why}.", console))
    lines += [*size_lines(report.shapes, console), *rank_lines(ranks_view(report.ranks), console)]
    lines += way_table(report, console) or _baselines(report, console)
    details = (
        waterfall_rows.sum_line(report),
        shared_rows.launch_line(report),
        baseline_rows.prediction_line(report),
        baseline_rows.warm_up_line(report),
        baseline_rows.overhead_line(report),
    )
    lines += [text_line(text, console, "dim") for text in details if text]
    lines += [*_numerics(report, console), *_warnings(report, console), Text("")]
    return Group(*lines, *_verdict(report, console), *gate_lines(report.gates, console))


def _verdict(report: Report, console: Console) -> list[RenderableType]:
    """The headline and its points, one a line."""
    head = headline(report)
    lines: list[RenderableType] = [text_line(head.text, console, f"bold {TONES[head.tone]}".strip())]
    lines += [text_line(f"{first_screen.sentence(point)}.", console) for point in head.points]
    counts = [f"{name} {figure}{f' ({change})' if change else ''}" for name, figure, change in shared_rows.tiles(report)]
    return [*lines, text_line(f"{'; '.join(counts)}.", console)] if counts else lines


def _numerics(report: Report, console: Console) -> list[RenderableType]:
    check = report.model_check
    if check is None:
        return []
    errors = f"relative L2 {units.error(check.fused_rel_l2)}, eager's own {units.error(check.eager_rel_l2)}"
    words = f"{'✓' if check.is_passed else '✗'} Error of the whole model against {check.oracle}: {errors}."
    likeliest = quality.likeliest_line(check)
    return [text_line(f"{words} {likeliest}".rstrip(), console, "" if check.is_passed else "red")]


def result_table(report: Report, console: Console) -> RenderableType:
    """Return the table that fits the report: applied rewrites, or found chains."""
    return profile_table(report, console) if report.status == "profiled" else apply_table(report, console)


def result_columns(report: Report) -> list[Column]:
    """Return that table's columns, none of them dropped, for a view that wraps by itself."""
    if report.training is not None and training.is_profile(report):
        return _module_columns(report, len(report.training.modules))
    return _fusion_columns(report) if report.fusions or report.rewrites else _chain_columns(report)


def details(report: Report, console: Console, *, with_source: bool = False) -> RenderableType:
    """Return what ``-v`` adds: the clocks, decisions with sites and errors, reasons for no kernel, and if asked the sources."""
    lines: list[RenderableType] = [Text(""), *(text_line(sentence, console, "dim") for _, sentence in clocks.rows(report))]
    replies = shared_rows.answers(report)
    for chain in report.chains:
        lines += [Text(""), text_line(f"{chain.id}  {' → '.join(chain.ops)}", console, "bold")]
        for site in chain.sites[:_MOST_SITES]:
            often = f", run {site.runs} times in a step" if site.runs > 1 else ""
            lines.append(text_line(f"  {site.module_path or 'top level'}  {_place(site)}{often}", console))
        left = len(chain.sites) - _MOST_SITES
        if left > 0:
            lines.append(text_line(f"  and {plural(left, 'more site')}", console, "dim"))
        answer = replies.get(chain.id)
        if answer is None or not isinstance(answer, Match):
            lines.append(text_line(f"  no kernel: {shared_rows.kernel_cell(report, chain)[1]}", console))
    rows: list[Fusion | GraphRewrite] = [*report.rewrites, *report.fusions]
    for row in rows:
        name = row.kernel if isinstance(row, Fusion) else row.name
        lines += [Text(""), text_line(f"{row.id}  {name}: {shared_rows.VERDICTS[row.status].words}", console, "bold")]
        lines.append(text_line(f"  {row.reason}", console))
        evidence = _evidence(row) if isinstance(row, Fusion) else []
        evidence += [bits for bits in (kernel_rows.bits_line(report, row),) if bits] if isinstance(row, Fusion) else []
        evidence += [f"{kernel.backend}, {kernel.origin}: {kernel.path}" for kernel in row.rendered]
        lines += [text_line(f"  {text}", console) for text in evidence]
        lines += [_source(kernel.source, console) for kernel in row.rendered if with_source]
    return Group(*lines)


def _place(site: Site) -> str:
    return f"{site.source_file}:{site.source_line}" if site.source_file else "no source line"


def _evidence(fusion: Fusion) -> list[str]:
    """Sites that were left alone, and errors."""
    lines = list(fusion.receipt.refusals)
    checked = fusion.numerics
    if checked is not None:
        lines.append(
            f"max abs error {units.error(checked.fused_max_abs)}, eager's own {units.error(checked.eager_max_abs)}; relative L2 "
            f"{units.error(checked.fused_rel_l2)}, eager's own {units.error(checked.eager_rel_l2)} against {checked.oracle} over "
            f"{plural(checked.elements, 'element')}"
        )
        lines += [f"tried on: {checked.inputs}", f"limit: {checked.limit}"]
        lines += [f"fault: {words}" for words in checked.faults]
        lines += [f"declared exception: {words}" for words in checked.declared]
    return lines


def _source(text: str, console: Console) -> Text:
    shown, left = visible_lines(text, _MOST_LINES, max(20, console.width - 4))
    more = [f"    {plural(left, 'more line')}"] if left else []
    return Text(
        "\n".join(units.ascii_only(line) if is_ascii(console) else line for line in (*(f"    {one}" for one in shown), *more))
    )


def _caveats(report: Report, console: Console) -> list[RenderableType]:
    return [*_context(report, console), *_warnings(report, console)]


def _context(report: Report, console: Console) -> list[RenderableType]:
    lines: list[RenderableType] = [text_line(shared_rows.context_line(report), console, "bold")]
    lines += [text_line(f"! {caveat}", console, "yellow") for caveat in shared_rows.caveats(report)]
    return [*lines, *(text_line(sentence, console) for sentence in shared_rows.step_lines(report))]


def _warnings(report: Report, console: Console) -> list[RenderableType]:
    return [text_line(f"! {sentence}", console, "yellow") for sentence in quality.warnings(report)[:_MOST_WARNINGS]]


def _findings(report: Report, console: Console) -> list[RenderableType]:
    """Findings that need no kernel; each change has its own line, so that it can be copied."""
    lines: list[RenderableType] = []
    for title, reason, change in shared_rows.finding_lines(report):
        lines += [text_line(f"{title}. {reason}.", console), text_line(f"   {change}", console, "cyan")]
    if lines:
        lines.insert(0, text_line("Without any kernel:", console, "bold"))
    if shared_rows.attention_line(report):
        lines.append(text_line(shared_rows.attention_line(report), console, "dim"))
    return lines


def _launches(report: Report, console: Console) -> list[RenderableType]:
    text = shared_rows.launch_line(report)
    return [text_line(text, console)] if text else []


def _baselines(report: Report, console: Console) -> list[RenderableType]:
    rows = baseline_rows.baseline_rows(report)
    if not rows:
        return []
    rested = tuple(row.rested for row in rows)
    columns = [
        Column("Run as", tuple(row.name.replace("torch.compile", "compile") for row in rows), flex_min=23),
        Column("Wall", tuple(row.wall for row in rows), is_right=True),
        Column("95% CI", tuple(row.spread for row in rows), drop=2),
        Column("Against ours", tuple(row.against for row in rows), is_right=True, drop=1),
        *([Column("After a rest", rested, is_right=True, drop=3)] if baseline_rows.has_rested(report) else []),
        Column(f"{shared_rows.device_word(report)} time", tuple(row.device for row in rows), is_right=True, drop=4),
        Column("First call", tuple(row.first_call for row in rows), is_right=True, drop=3),
        Column("Peak memory", tuple(row.memory for row in rows), is_right=True, drop=5),
    ]
    reasons = [f"{row.note}." if row.note.startswith(row.name) else f"{row.name}: {row.note}." for row in rows if row.wall == "–"]
    cost = baseline_rows.cost_line(report)
    return [
        fitted_table(columns, console),
        *(text_line(reason, console, "dim") for reason in reasons),
        *([text_line(cost, console)] if cost else []),
        Text(""),
    ]


def _chain_columns(report: Report) -> list[Column]:
    device = shared_rows.device_word(report)
    replies = shared_rows.answers(report)
    rows = report.chains

    def launches(index: int) -> str:
        chain = rows[index]
        after = chain.runs if isinstance(replies.get(chain.id), Match) else "?"
        return f"{chain.launches}→{after}"

    names = [shared_rows.kernel_cell(report, chain)[0] for chain in rows]
    return [
        Column("#", tuple(str(at + 1) for at in range(len(rows))), "cyan", drop=1),
        Column("Chain", tuple(" → ".join(chain.ops) for chain in rows), flex_min=16),
        *_pass_column(report, rows),
        Column("Sites", tuple(str(len(chain.sites)) for chain in rows), is_right=True, drop=2),
        Column("Kernels", tuple(launches(at) for at in range(len(rows))), is_right=True, drop=4),
        Column(f"{device} ms", tuple(units.milliseconds(chain.device_ns) for chain in rows), is_right=True),
        Column("Share", tuple(units.share(chain.share) for chain in rows), is_right=True),
        Column("Save ms", tuple(_bound(chain.saving_bound_ns) for chain in rows), is_right=True, drop=3),
        Column(
            "Kernel",
            tuple(visible(name, 24) or f"none ({_code(report, chain.id)})" for name, chain in zip(names, rows, strict=True)),
            cell_styles=tuple("cyan" if name else "dim" for name in names),
        ),
    ]


def _pass_column(report: Report, rows: Sequence[Chain | Fusion | GraphRewrite]) -> list[Column]:
    """The pass of each row, for a training step."""
    return [] if report.training is None else [Column("Pass", tuple(row.training_pass for row in rows))]


def _bound(ns: int) -> str:
    return f"≤{units.milliseconds(ns)}" if ns > 0 else "–"


def _code(report: Report, chain_id: str) -> str:
    answer = shared_rows.answers(report).get(chain_id)
    return "–" if answer is None or isinstance(answer, Match) else answer.code


def _fusion_columns(report: Report) -> list[Column]:
    rows: list[Fusion | GraphRewrite] = [*report.rewrites, *report.fusions]
    verdicts = [shared_rows.VERDICTS[row.status] for row in rows]

    def gain(index: int) -> str:
        ns = rows[index].step_delta_ns
        return "–" if ns is None else units.delta(ns)

    def spread(index: int) -> str:
        ends = rows[index].step_delta_ci_ns
        return "" if ends is None else units.delta_interval(*ends)

    def site(index: int) -> str:
        row = rows[index]
        if isinstance(row, Fusion) and row.implausible:
            return "implausible"
        if not isinstance(row, Fusion) or row.chain_before is None or row.chain_after is None:
            return "–"
        return f"{units.duration(row.chain_before.median_ns)} → {units.duration(row.chain_after.median_ns)}"

    def error(index: int) -> str:
        row = rows[index]
        return units.error(row.numerics.fused_rel_l2) if isinstance(row, Fusion) and row.numerics else "–"

    def sites(index: int) -> str:
        row = rows[index]
        return f"{row.receipt.sites_replaced}/{row.receipt.sites_found}" if isinstance(row, Fusion) else str(row.sites)

    span = range(len(rows))
    return [
        # The id of a graph rewrite is a word that says what its title does: both would take half of a narrow terminal.
        Column("ID", tuple(row.id if isinstance(row, Fusion) else "" for row in rows), "cyan"),
        Column("Rewrite", tuple(row.kernel if isinstance(row, Fusion) else row.id for row in rows), flex_min=12),
        *_pass_column(report, rows),
        Column("Sites", tuple(sites(at) for at in span), is_right=True, drop=3),
        Column("One site", tuple(site(at) for at in span), is_right=True, drop=4),
        Column("Step", tuple(gain(at) for at in span), is_right=True),
        Column("Predicted", tuple(baseline_rows.predicted(row) for row in rows), is_right=True, drop=5),
        *_predicted_intervals(rows),
        Column("95% CI", tuple(spread(at) for at in span), drop=1),
        Column("Rel err", tuple(error(at) for at in span), is_right=True, drop=2),
        Column(
            "Verdict",
            tuple(f"{verdict.mark} {verdict.words}" for verdict in verdicts),
            cell_styles=tuple(TONES[verdict.tone] for verdict in verdicts),
        ),
    ]


def _predicted_intervals(rows: Sequence[Fusion | GraphRewrite]) -> list[Column]:
    """The column of the predictions' intervals; none in reports that were written before there were any."""
    intervals = tuple(map(baseline_rows.predicted_interval, rows))
    return [Column("Predicted 90%", intervals, drop=6)] if any(intervals) else []


def summary_line(report: Report) -> str:
    """Return the one line that ``-q`` leaves."""
    return f"{headline(report).text} {plural(kept_count(report), 'rewrite')} kept."


def as_text(report: Report, width: int = 120) -> str:
    """Return that table as plain text, for a Python prompt.

    Args:
        report: any report.
        width: of a line, in characters.
    """
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(result_table(report, console))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
