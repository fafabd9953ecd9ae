"""Output of ``profile --trace``: chains, kernels, and the limits of a trace."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.text import Text

from fusion_advisor import units
from fusion_advisor.records import TraceChain, TraceReport
from fusion_advisor.report.escape import plural, visible
from fusion_advisor.report.ranks.rows import trace_ranks_view
from fusion_advisor.report.terminal.layout import Column, column_table, plain
from fusion_advisor.report.terminal.ranks import rank_lines


def trace_table(report: TraceReport, console: Console) -> RenderableType:
    """Return the chains and kernels of a trace, and the sentences that limit them."""
    lines: list[RenderableType] = [_line(_context(report), console, "bold")]
    lines += [_line(f"! {warning}.", console, "yellow") for warning in report.warnings]
    lines += rank_lines(trace_ranks_view(report.ranks), console)
    if report.chains:
        lines += [column_table(_chain_columns(report), console), _line(trace_summary(report), console)]
        if any(chain.saving_bound_ns is not None for chain in report.chains):
            rate = units.bandwidth(report.bytes_per_s or 0)
            sentence = f"Save is an upper bound at {rate}, the fastest pointwise kernel of the trace; bounds do not add up."
            lines.append(_line(sentence, console, "dim"))
        if any(chain.kernel for chain in report.chains):
            words = 'Looks like: the op names are those of a library kernel ("part": of a part of it); a hint, not a match.'
            lines.append(_line(words, console, "dim"))
    else:
        lines.append(_line(trace_summary(report), console))
    lines += [Text(""), column_table(_kernel_columns(report), console)]
    if report.ranked_left_out:
        left = plural(report.ranked_left_out, "more kernel")
        lines.append(_line(f"{left}; --top N shows more.", console, "dim"))
    lines += [Text(""), _line("This trace cannot tell:", console, "bold")]
    lines += [_line(f"- {sentence}", console) for sentence in report.unknown]
    return Group(*lines)


def trace_summary(report: TraceReport) -> str:
    """Return the one line that ``-q`` leaves."""
    if not report.chains:
        return "No pointwise or reduction kernels repeat in one order with a share worth naming (--min-share)."
    shown = sum(chain.share for chain in report.chains)
    more = f"; {plural(report.chains_left_out, 'chain')} beyond --top" if report.chains_left_out else ""
    return f"{units.share(shown)} of {_device(report)} time is in {plural(len(report.chains), 'chain')} that repeat{more}."


def _device(report: TraceReport) -> str:
    return "GPU" if report.device_kind == "cuda" else "CPU"


def _context(report: TraceReport) -> str:
    parts = [report.trace.replace("\\", "/").rsplit("/", 1)[-1], ", ".join(report.device_names) or _device(report)]
    if report.steps:
        parts.append(plural(report.steps, "step"))
    parts.append(plural(report.kernels, "kernel" if report.device_kind == "cuda" else "op call"))
    if report.launches:
        parts.append(plural(report.launches, "launch", "launches"))
    parts.append(f"{units.duration(report.busy_ns)} busy of {units.duration(report.span_ns)}")
    return " · ".join(parts)


def _chain_columns(report: TraceReport) -> list[Column]:
    rows = report.chains
    columns = [
        Column("#", tuple(str(at + 1) for at in range(len(rows))), "cyan", drop=1),
        Column("Chain", tuple(" → ".join(chain.ops) for chain in rows), flex_min=16),
        Column("Sites", tuple(units.number(chain.sites) for chain in rows), is_right=True, drop=2),
        Column("Kernels", tuple(f"{units.number(chain.launches)}→?" for chain in rows), is_right=True, drop=4),
        Column(f"{_device(report)} ms", tuple(units.milliseconds(chain.device_ns) for chain in rows), is_right=True),
        Column("Share", tuple(units.share(chain.share) for chain in rows), is_right=True),
    ]
    if any(chain.saving_bound_ns is not None for chain in rows):
        columns.append(Column("Save ms", tuple(map(_bound, rows)), is_right=True, drop=3))
    likes = tuple(_like(chain) for chain in rows)
    styles = tuple("cyan" if chain.kernel else "dim" for chain in rows)
    columns.append(Column("Looks like", likes, cell_styles=styles))
    return columns


def _bound(chain: TraceChain) -> str:
    return f"≤{units.milliseconds(chain.saving_bound_ns)}" if chain.saving_bound_ns else "–"


def _like(chain: TraceChain) -> str:
    return visible(chain.kernel, 24) + ("" if chain.is_whole else ", part") if chain.kernel else "–"


def _kernel_columns(report: TraceReport) -> list[Column]:
    rows = report.ranked
    return [
        Column("Kernel" if report.device_kind == "cuda" else "Op call", tuple(row.name for row in rows), flex_min=20),
        Column("Op", tuple(visible(row.op, 28) for row in rows), "cyan", drop=2),
        Column("Class", tuple(row.category for row in rows), drop=3),
        Column("Count", tuple(units.number(row.count) for row in rows), is_right=True, drop=4),
        Column(f"{_device(report)} ms", tuple(units.milliseconds(row.device_ns) for row in rows), is_right=True),
        Column("Share", tuple(units.share(row.share) for row in rows), is_right=True),
    ]


def _line(text: str, console: Console, style: str = "") -> Text:
    return Text(plain(text, console), style=style, overflow="fold")
