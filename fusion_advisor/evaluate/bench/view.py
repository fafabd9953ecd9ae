"""The tables of ``kernels bench``, for a terminal and as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.text import Text

from fusion_advisor import units
from fusion_advisor.codegen.registry import BACKENDS
from fusion_advisor.evaluate.bench.records import BenchRow, BenchRun, Entrant
from fusion_advisor.report.escape import plural
from fusion_advisor.report.terminal.layout import Column, column_table, plain

NAMES = {
    "eager": "eager",
    "compile": "torch.compile",
    "liger": "Liger",
    "cublas": "cuBLAS",
    **{one.name: f"our {one.title}" for one in BACKENDS},
    "chosen": "our choice",
}
_DROP = {"Wins": 6, "Moves": 5, "Limit µs": 4, "eager": 3, "compile": 2, "Liger": 1}
"""What a narrow terminal loses, the largest first: the last two columns say how we stand to all of them."""
_LEVEL = 0.03
"""Within three percent of the best peer is level with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows of one kernel, variant and dtype: one table."""

    title: str
    heads: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    """Shape, bytes, limit, one per contender, share of the limit, speedup over the best peer, winner."""
    tones: tuple[str, ...]
    """Of the speedup, per row."""
    notes: tuple[str, ...]


def blocks(run: BenchRun) -> Iterator[Block]:
    """Yield the run's tables."""
    keys = dict.fromkeys((row.kernel, row.variant, row.dtype) for row in run.rows)
    for kernel, variant, dtype in keys:
        rows = [row for row in run.rows if (row.kernel, row.variant, row.dtype) == (kernel, variant, dtype)]
        names = list(dict.fromkeys(entrant.name for row in rows for entrant in row.entrants))
        heads = (
            "Shape",
            "Moves",
            "Limit µs",
            *(NAMES.get(name, name).removeprefix("torch.") for name in names),
            "Of limit",
            "vs peer",
            "Wins",
        )
        cells = [
            (
                row.size_text + ("" if row.is_past_cache else " *"),
                units.size(row.moved_bytes),
                _microseconds(row.limit_ns),
                *(_time(row, name) for name in names),
                "–" if row.of_limit is None else f"{row.of_limit:.2f}",
                "–" if row.speedup is None else units.speedup(row.speedup),
                NAMES.get(row.winner, row.winner) or "–",
            )
            for row in rows
        ]
        yield Block(
            title=f"{kernel} ({variant}), {dtype}",
            heads=heads,
            cells=tuple(cells),
            tones=tuple(_tone(row.speedup) for row in rows),
            notes=tuple(_notes(rows)),
        )


def _microseconds(ns: float) -> str:
    value = ns / 1e3
    return f"{value:.2f}" if value < 99.95 else f"{value:,.0f}"


def _time(row: BenchRow, name: str) -> str:
    timing = row.timing_of(name)
    return "–" if timing is None else _microseconds(timing.median_ns)


def _tone(speedup: float | None) -> str:
    if speedup is None:
        return ""
    return "green" if speedup > 1 + _LEVEL else "red" if speedup < 1 - _LEVEL else ""


def _notes(rows: Sequence[BenchRow]) -> Iterator[str]:
    if not all(row.is_past_cache for row in rows):
        yield "* The inputs of all sets fit in the cache, as those of a kernel that follows another in a model do."
    said: dict[tuple[str, str], list[Entrant]] = {}
    for row in rows:
        for entrant in row.entrants:
            if entrant.note:
                said.setdefault((entrant.name, entrant.note), []).append(entrant)
    for (name, note), found in said.items():
        where = "" if len(found) == len(rows) else f" ({len(found)} of {len(rows)} shapes)"
        yield f"{NAMES.get(name, name)}{where}: {note}"


def context_line(run: BenchRun) -> str:
    """The device, what it can do, and the versions."""
    versions = ", ".join(f"{name} {version}" for name, version in run.peers)
    triton = f", triton {run.environment.triton}" if run.environment.triton and run.environment.device_kind == "cuda" else ""
    rate, launch = units.bandwidth(run.bandwidth.copy_bytes_per_s), units.duration(run.bandwidth.launch_ns)
    return f"{run.environment.device_name}: copy {rate}, empty launch {launch}; {versions}{triton}"


def summary_line(run: BenchRun) -> str:
    """The one line that ``-q`` leaves."""
    shares = [row.of_limit for row in run.rows if row.of_limit is not None]
    beaten = [row for row in run.rows if row.speedup is not None]
    if not shares:
        return f"{plural(len(run.rows), 'row')}; none of ours could be timed."
    level = sum((row.speedup or 0) > 1 - _LEVEL for row in beaten)
    middle = f"median {statistics.median(shares):.2f} of the limit"
    return f"{plural(len(run.rows), 'row')}: {middle}; level with the best peer or faster in {level} of {len(beaten)}."


def bench_tables(run: BenchRun, console: Console) -> RenderableType:
    """Return the run for a terminal: times in microseconds, medians."""
    lines: list[RenderableType] = [Text(plain(context_line(run), console), style="bold", overflow="fold")]
    for block in blocks(run):
        lines += [Text(""), Text(plain(block.title, console), style="bold cyan", overflow="fold")]
        last = len(block.heads) - 1
        columns = []
        for at, head in enumerate(block.heads):
            texts = tuple(cells[at] for cells in block.cells)
            if at == 0:
                columns.append(Column(head, texts, flex_min=max(map(len, texts))))
            elif at == last - 1:
                columns.append(Column(head, texts, is_right=True, cell_styles=block.tones))
            else:
                columns.append(Column(head, texts, is_right=at != last, drop=_DROP.get(head, 0)))
        lines.append(column_table(columns, console))
        lines += [Text(plain(note, console), style="dim", overflow="fold") for note in block.notes]
    lines += [Text(""), Text(plain("Times are medians in µs of one call.", console), style="dim")]
    return Group(*lines)


def bench_markdown(run: BenchRun) -> str:
    """Return the run as Markdown."""
    parts = ["# Kernel bench", "", context_line(run) + ".", "", *(f"- {sentence}" for sentence in run.method), ""]
    for block in blocks(run):
        parts += [f"## {_escaped(block.title)}", "", "Medians in µs; the interval of each is in `bench.json`.", ""]
        parts.append("| " + " | ".join(_escaped(head) for head in block.heads) + " |")
        parts.append("|--|" + "--:|" * (len(block.heads) - 2) + "--|")
        parts += ["| " + " | ".join(_escaped(cell) for cell in cells) + " |" for cells in block.cells]
        parts += ["", *(f"{_escaped(note)}  " for note in block.notes), ""]
    return "\n".join(parts).rstrip() + "\n"


def _escaped(text: str) -> str:
    return "".join(f"\\{sign}" if sign in "\\|*_<>`[]" else sign for sign in text)
