"""Result tables for a terminal: widths are computed here, so that nothing is squeezed to ``c…``.

One column flexes, the others are as wide as their content. Where the terminal is too narrow, columns are dropped in a fixed
order. Dynamic text goes through :class:`rich.text.Text`, never through markup: ``[/]`` in a kernel's name would raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.text import Text

from fusion_advisor import units
from fusion_advisor.records import Fusion, Gate, GraphRewrite, Match, Report, Site, Training
from fusion_advisor.report import baseline_rows, clocks, quality, shared_rows
from fusion_advisor.report.compare import gate_rules as gates
from fusion_advisor.report.compare import rows as compare_tables
from fusion_advisor.report.compare.comparison import Comparison
from fusion_advisor.report.escape import plural, visible, visible_lines
from fusion_advisor.report.headline import headline, kept_count

TONES = {"gain": "green", "loss": "red", "warn": "yellow", "plain": ""}
_GAP = 2
_MOST_WARNINGS = 5
_MOST_ROWS = 15
_MOST_CHANGES = 12
_MOST_SITES = 8
_MOST_LINES = 200


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    head: str
    cells: tuple[str, ...]
    style: str = ""
    is_right: bool = False
    drop: int = 0
    """Columns with the largest number go first; 0 stays."""
    flex_min: int = 0
    """Above 0: the column that gives way, and how narrow it may get before others are dropped."""
    cell_styles: tuple[str, ...] = ()


def profile_table(report: Report, console: Console) -> RenderableType:
    """Return the chains of a profile, the sum below them, and what limits the figures."""
    lines = [*_caveats(report, console)]
    if report.training is not None:
        return Group(*lines, *_training(report, report.training, console), _line(headline(report).text, console))
    table = _table(_chain_columns(report), console) if report.chains else Text("")
    if report.chains:
        lines.append(table)
    lines.append(_line(headline(report).text, console))
    if "Save" in table.plain.partition("\n")[0]:  # a narrow terminal drops the column
        lines.append(_line("Save is an upper bound; bounds of different chains do not add up.", console, "dim"))
    return Group(*lines, *_launches(report, console), *_findings(report, console))


def _training(report: Report, training: Training, console: Console) -> list[RenderableType]:
    """Modules and kernels of a training step."""
    kernels, total = report.before.kernels[:_MOST_ROWS], max(report.before.device_ns, 1)
    columns = [
        Column("Kernel", tuple(name for name, _, _, _ in kernels), flex_min=16),
        Column("Category", tuple(category for _, category, _, _ in kernels), drop=1),
        Column("Count", tuple(units.number(count) for _, _, count, _ in kernels), is_right=True),
        Column(f"{shared_rows.device_word(report)} ms", tuple(units.milliseconds(ns) for _, _, _, ns in kernels), is_right=True),
        Column("Share", tuple(units.share(ns / total) for _, _, _, ns in kernels), is_right=True),
    ]
    left = [(len(training.modules) - _MOST_ROWS, "module"), (len(report.before.kernels) - _MOST_ROWS, "kernel")]
    words = ", ".join(plural(count, f"more {what}") for count, what in left if count > 0)
    more = [_line(f"{words} in the report.", console, "dim")] if words else []
    return [_table(_module_columns(report, _MOST_ROWS), console), Text(""), _table(columns, console), *more, Text("")]


def _module_columns(report: Report, limit: int) -> list[Column]:
    rows = shared_rows.module_rows(report, limit)
    return [
        Column("Module", tuple(row[0] for row in rows), flex_min=16),
        Column("Modules", tuple(row[1] for row in rows), is_right=True, drop=2),
        Column("Kernels", tuple(row[2] for row in rows), is_right=True, drop=1),
        Column("Forward", tuple(row[3] for row in rows), is_right=True),
        Column("Backward", tuple(row[4] for row in rows), is_right=True),
        Column("Share", tuple(row[5] for row in rows), is_right=True),
    ]


def apply_table(report: Report, console: Console) -> RenderableType:
    """Return each rewrite's gain, the step before and after, and the numerics."""
    head = headline(report)
    lines = [*_caveats(report, console)]
    if report.fusions or report.rewrites:
        lines += [_table(_fusion_columns(report), console), Text("")]
    else:
        lines.append(_line("No rewrite was tried: no chain had a kernel.", console))
    lines.append(_line(head.text, console, f"bold {TONES[head.tone]}".strip()))
    if shared_rows.is_unchanged(report):
        lines.append(_line(f"{'; '.join(head.points)}.", console))
    elif report.after is not None:
        launches = f"{units.number(report.before.launches)} → {units.number(report.after.launches)} launches"
        lines.append(_line(f"{launches}; {'; '.join(head.points)}.", console))
    check = report.model_check
    if check is not None:
        errors = f"relative L2 {units.error(check.fused_rel_l2)}, eager's own {units.error(check.eager_rel_l2)}"
        agree = "" if check.argmax_agreement is None else f", same token {units.share(check.argmax_agreement)}"
        agree += "" if check.top5_agreement is None else f", same top five {units.share(check.top5_agreement)}"
        words = f"Numerics {'✓' if check.is_passed else '✗'} end to end against {check.oracle}: {errors}{agree}."
        lines.append(_line(words, console, "" if check.is_passed else "red"))
    lines += _launches(report, console)
    lines += [
        _line(text, console) for text in (baseline_rows.prediction_line(report), baseline_rows.warm_up_line(report)) if text
    ]
    return Group(*lines, *_baselines(report, console), *gate_lines(report.gates, console))


def result_table(report: Report, console: Console) -> RenderableType:
    """Return the table that fits the report: applied rewrites, or found chains."""
    return profile_table(report, console) if report.status == "profiled" else apply_table(report, console)


def result_columns(report: Report) -> list[Column]:
    """Return that table's columns, none of them dropped, for a view that wraps by itself."""
    if report.training is not None:
        return _module_columns(report, len(report.training.modules))
    return _fusion_columns(report) if report.fusions or report.rewrites else _chain_columns(report)


def is_ascii(console: Console) -> bool:
    """Whether a console's stream can show only ASCII."""
    return not (console.encoding or "").lower().replace("-", "").startswith("utf")


def details(report: Report, console: Console, *, with_source: bool = False) -> RenderableType:
    """Return what ``-v`` adds: the clocks, decisions with sites and errors, reasons for no kernel, and if asked the sources."""
    lines: list[RenderableType] = [Text(""), *(_line(sentence, console, "dim") for _, sentence in clocks.rows(report))]
    replies = shared_rows.answers(report)
    for chain in report.chains:
        lines += [Text(""), _line(f"{chain.id}  {' → '.join(chain.ops)}", console, "bold")]
        for site in chain.sites[:_MOST_SITES]:
            often = f", run {site.runs} times in a step" if site.runs > 1 else ""
            lines.append(_line(f"  {site.module_path or 'top level'}  {_place(site)}{often}", console))
        left = len(chain.sites) - _MOST_SITES
        if left > 0:
            lines.append(_line(f"  and {plural(left, 'more site')}", console, "dim"))
        answer = replies.get(chain.id)
        if answer is None or not isinstance(answer, Match):
            lines.append(_line(f"  no kernel: {shared_rows.kernel_cell(report, chain)[1]}", console))
    rows: list[Fusion | GraphRewrite] = [*report.rewrites, *report.fusions]
    for row in rows:
        name = row.kernel if isinstance(row, Fusion) else row.name
        lines += [Text(""), _line(f"{row.id}  {name}: {shared_rows.VERDICTS[row.status].words}", console, "bold")]
        lines.append(_line(f"  {row.reason}", console))
        evidence = _evidence(row) if isinstance(row, Fusion) else []
        evidence += [bits for bits in (shared_rows.bits_line(report, row),) if bits] if isinstance(row, Fusion) else []
        evidence += [f"{kernel.backend}, {kernel.origin}: {kernel.path}" for kernel in row.rendered]
        lines += [_line(f"  {text}", console) for text in evidence]
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


def compare_table(shown: Comparison, console: Console, *, is_whole: bool = False) -> RenderableType:
    """Return two runs side by side; what did not change is one line, unless ``is_whole``."""
    head = compare_tables.headline(shown)
    lines: list[RenderableType] = [
        _line(compare_tables.side_line("A", shown.a), console),
        _line(compare_tables.side_line("B", shown.b), console),
        *(_line(f"! {caveat}", console, "yellow") for caveat in shown.caveats),
        Text(""),
        _table(_compare_columns(compare_tables.step_table(shown).rows, "Step"), console),
    ]
    for table in compare_tables.change_tables(shown):
        rows = (*table.rows, *table.unchanged) if is_whole else table.rows[:_MOST_CHANGES]
        lines.append(Text(""))
        if rows:
            lines.append(_table(_compare_columns(rows, table.title), console))
        else:
            lines.append(_line(f"{table.title}: nothing changed.", console, "bold"))
        folded = [] if is_whole else [(len(table.rows) - len(rows), "smaller change"), (len(table.unchanged), "unchanged row")]
        words = ", ".join(plural(count, word) for count, word in folded if count)
        if words:
            lines.append(_line(f"{words} not shown (-v shows all)", console, "dim"))
    lines += [Text(""), _line(head.text, console, f"bold {TONES[head.tone]}".strip())]
    lines += [_line(f"{point[0].upper()}{point[1:]}.", console) for point in head.points]
    lines.append(_line(compare_tables.method_line(shown), console, "dim"))
    return Group(*lines, *gate_lines(shown.gates, console))


def gate_lines(judged: Sequence[Gate], console: Console) -> list[RenderableType]:
    """Return one line for each gate: sign, rule, figures."""
    styles = {"passed": "green", "failed": "red"}
    lines: list[RenderableType] = []
    for one in judged:
        line = _line(f"{gates.mark(one)} gate {one.rule}: {one.reason}", console)
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


def plain(text: str, console: Console) -> str:
    """Return text safe for this console: unseen characters spelled, and signs in ASCII where it needs that."""
    shown = visible(text, 360)
    return units.ascii_only(shown) if is_ascii(console) else shown


def _caveats(report: Report, console: Console) -> list[RenderableType]:
    lines: list[RenderableType] = [_line(shared_rows.context_line(report), console, "bold")]
    lines += [_line(f"! {caveat}", console, "yellow") for caveat in shared_rows.caveats(report)]
    lines += [_line(sentence, console) for sentence in shared_rows.step_lines(report)]
    lines += [_line(f"! {sentence}", console, "yellow") for sentence in quality.warnings(report)[:_MOST_WARNINGS]]
    return lines


def _findings(report: Report, console: Console) -> list[RenderableType]:
    """Findings that need no kernel; each change has its own line, so that it can be copied."""
    lines: list[RenderableType] = []
    for title, reason, change in shared_rows.finding_lines(report):
        lines += [_line(f"{title}. {reason}.", console), _line(f"   {change}", console, "cyan")]
    if lines:
        lines.insert(0, _line("Without any kernel:", console, "bold"))
    if shared_rows.attention_line(report):
        lines.append(_line(shared_rows.attention_line(report), console, "dim"))
    return lines


def _launches(report: Report, console: Console) -> list[RenderableType]:
    text = shared_rows.launch_line(report)
    return [_line(text, console)] if text else []


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
    reasons = [f"{row.name}: {row.note}." for row in rows if row.wall == "–"]
    cost = baseline_rows.cost_line(report)
    return [
        Text(""),
        _table(columns, console),
        *(_line(reason, console, "dim") for reason in reasons),
        *([_line(cost, console)] if cost else []),
    ]


def _line(text: str, console: Console, style: str = "") -> Text:
    return Text(plain(text, console), style=style, overflow="fold")


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
        Column("Sites", tuple(sites(at) for at in span), is_right=True, drop=3),
        Column("One site", tuple(site(at) for at in span), is_right=True, drop=4),
        Column("Step", tuple(gain(at) for at in span), is_right=True),
        Column("Predicted", tuple(baseline_rows.predicted(row) for row in rows), is_right=True, drop=5),
        Column("95% CI", tuple(spread(at) for at in span), drop=1),
        Column("Rel err", tuple(error(at) for at in span), is_right=True, drop=2),
        Column(
            "Verdict",
            tuple(f"{verdict.mark} {verdict.words}" for verdict in verdicts),
            cell_styles=tuple(TONES[verdict.tone] for verdict in verdicts),
        ),
    ]


def _table(columns: list[Column], console: Console) -> Text:
    """Lay columns out for the console's width; every line is at most that wide, and what is cut ends in an ellipsis.

    Where even the columns that stay are too wide, each row takes two lines: up to the column that flexes, and the rest below.
    """
    shown = [_prepared(column, console) for column in columns]
    width = console.width
    while _needed(shown) > width:
        droppable = [column for column in shown if column.drop]
        if not droppable:
            break
        shown.remove(max(droppable, key=lambda column: column.drop))
    head = next(at for at, column in enumerate(shown) if column.flex_min) + 1
    if _needed(shown) <= width or head == len(shown):
        lines = _laid_out(shown, width, console)
    else:
        below = _laid_out(shown[head:], width - _GAP, console)
        pairs = zip(_laid_out(shown[:head], width, console), below, strict=True)
        lines = [line for name, rest in pairs for line in (name, Text(" " * _GAP).append_text(rest))]
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _laid_out(columns: list[Column], width: int, console: Console) -> list[Text]:
    """The lines of a table, its heads first; where it is too wide, what flexes gives way first and then the widest columns."""
    widths = [max(cell_len(text) for text in (column.head, *column.cells)) for column in columns]
    gaps = _GAP * (len(columns) - 1)
    for at in [at for at, column in enumerate(columns) if column.flex_min]:
        widths[at] = min(widths[at], max(4, widths[at] + width - sum(widths) - gaps))
    while sum(widths) + gaps > width and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in range(-1, len(columns[0].cells)):
        line = Text()
        for at, column in enumerate(columns):
            text = column.head if row < 0 else column.cells[row]
            style = "bold" if row < 0 else column.cell_styles[row] if column.cell_styles else column.style
            is_last = at == len(columns) - 1
            line.append(_fitted(text, widths[at], console, is_right=column.is_right, is_last=is_last), style=style)
            line.append("" if is_last else " " * _GAP)
        lines.append(line)
    return lines


def _prepared(column: Column, console: Console) -> Column:
    cells = tuple(plain(text, console)[:400] for text in column.cells)
    return Column(
        plain(column.head, console), cells, column.style, column.is_right, column.drop, column.flex_min, column.cell_styles
    )


def _needed(columns: list[Column]) -> int:
    widths = []
    for column in columns:
        widest = max(cell_len(text) for text in (column.head, *column.cells))
        widths.append(min(widest, column.flex_min) if column.flex_min else widest)
    return sum(widths) + _GAP * (len(columns) - 1)


def _fitted(text: str, width: int, console: Console, *, is_right: bool, is_last: bool) -> str:
    if cell_len(text) > width:
        dots = ".." if is_ascii(console) else "…"
        return set_cell_size(text, max(0, width - len(dots))) + dots[:width]
    if is_right:
        return " " * (width - cell_len(text)) + text
    return text if is_last else set_cell_size(text, width)


def summary_line(report: Report) -> str:
    """Return the one line that ``-q`` leaves."""
    return f"{headline(report).text} {plural(kept_count(report), 'rewrite')} kept."


def column_table(columns: Sequence[Column], console: Console) -> Text:
    """Return columns, one of which flexes, laid out for the console's width."""
    return _table(list(columns), console)


def simple_table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], console: Console) -> RenderableType:
    """Return plain rows whose last column gives way."""
    columns = [Column(head, tuple(row[at] for row in rows)) for at, head in enumerate(heads)]
    last = columns[-1]
    columns[-1] = Column(last.head, last.cells, flex_min=max(12, len(last.head)))
    return _table(columns, console)
