"""One figure per kernel of ``kernels bench``: time against bytes moved, and below it the share of the limit reached.

On logarithmic axes everything near the limit looks the same; the lower panel is where 0.90 and 0.98 differ. Colours are those of
Okabe and Ito, distinguishable with every kind of colour vision; markers differ as well. Nothing in a file says when it was drawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fusion_advisor import units
from fusion_advisor.codegen.registry import NAMES as BACKENDS
from fusion_advisor.evaluate.bench.records import BenchRow, BenchRun
from fusion_advisor.evaluate.bench.view import NAMES
from fusion_advisor.report.escape import visible

NO_MATPLOTLIB = "no plots: matplotlib is not installed (pip install 'fusion-advisor[bench]')"


class CannotPlot(Exception):
    """matplotlib is not there."""


@dataclass(frozen=True, slots=True)
class _Style:
    color: str
    marker: str
    width: float = 1.4
    size: float = 5.0


_OURS = (
    _Style("#D55E00", "D", width=2.0), _Style("#0072B2", "v", width=2.0, size=6.0), _Style("#009E73", "P", width=2.0, size=6.5),
    _Style("#F0E442", "p", width=2.0, size=6.5),
)  # fmt: skip
"""In the order of the registry."""
_STYLES = {
    "eager": _Style("#8c8c8c", "o"),
    "compile": _Style("#E69F00", "s"),
    "liger": _Style("#56B4E9", "^", size=6.0),
    "cublas": _Style("#CC79A7", "X", size=6.0),
    **dict(zip(BACKENDS, itertools.cycle(_OURS), strict=False)),
    "chosen": _Style("#009E73", "*", width=2.0, size=7.0),
}
_INK, _FAINT = "#222222", "#d9d9d9"


def draw(run: BenchRun, directory: Path) -> list[Path]:
    """Write ``<kernel>.png`` and ``.svg`` for every kernel of a run; kernels without a single timing get none.

    Raises:
        CannotPlot: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CannotPlot(NO_MATPLOTLIB) from error
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for kernel in dict.fromkeys(row.kernel for row in run.rows):
        rows = [row for row in run.rows if row.kernel == kernel and row.winner]
        if not rows:
            continue
        settings: dict[Any, Any] = {
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "axes.edgecolor": "#666666",
            "axes.linewidth": 0.8,
            "svg.hashsalt": f"fusion-advisor {kernel}",  # else element ids differ from run to run
            "svg.fonttype": "path",
        }
        with matplotlib.rc_context(settings):
            figure = _figure(Figure, run, kernel, rows)
            for suffix, options in (
                (".png", {"dpi": 160, "metadata": {"Software": None}}),
                (".svg", {"metadata": {"Date": None}}),
            ):
                path = directory / f"{kernel}{suffix}"
                figure.savefig(path, facecolor="white", **options)
                written.append(path)
    return written


def _figure(figure_class: Any, run: BenchRun, kernel: str, rows: Sequence[BenchRow]) -> Any:
    panels = list(dict.fromkeys((row.variant, row.dtype) for row in rows))
    figure = figure_class(figsize=(max(7.0, 4.8 * len(panels)), 6.4), layout="constrained")
    axes = figure.subplots(
        2, len(panels), sharex="col", sharey="row", squeeze=False, gridspec_kw={"height_ratios": [2.2, 1.0], "hspace": 0.04}
    )
    handles: dict[str, Any] = {}
    for at, (variant, dtype) in enumerate(panels):
        mine = [row for row in rows if (row.variant, row.dtype) == (variant, dtype)]
        _panel(axes[0][at], axes[1][at], run, mine, handles)
        axes[0][at].set_title(f"{variant}, {dtype}", color=_INK, fontsize=9.5)
    axes[0][0].set_ylabel("time of one call (µs)")
    axes[1][0].set_ylabel("share of the limit")
    figure.suptitle(f"{kernel}: time against bytes moved", fontsize=12, fontweight="bold", color=_INK)
    device = visible(run.environment.device_name, 80).replace("$", r"\$")
    rate, launch = units.bandwidth(run.bandwidth.copy_bytes_per_s), units.duration(run.bandwidth.launch_ns)
    # The device under the title, where a cut-out of the figure still shows it.
    figure.supxlabel(f"bytes moved\n{device}, torch {run.environment.torch}; limit: {rate} + {launch} launch", fontsize=9)
    order = ["limit", *(name for name in _STYLES if name in handles)]
    # Times grow to the right, so the upper left corner is free.
    axes[0][0].legend(
        [handles[name] for name in order],
        ["memory limit", *(NAMES[name] for name in order[1:])],
        loc="upper left",
        frameon=True,
        framealpha=0.9,
        edgecolor="none",
        fontsize=8.5,
        handlelength=2.4,
    )
    return figure


def _panel(top: Any, bottom: Any, run: BenchRun, rows: Sequence[BenchRow], handles: dict[str, Any]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    sizes = [row.moved_bytes for row in rows]
    low, high = min(sizes) / 1.4, max(sizes) * 1.4
    grid = np.geomspace(max(low, 1), high, 200)
    limit = grid / run.bandwidth.copy_bytes_per_s * 1e6 + run.bandwidth.launch_ns / 1e3
    handles["limit"] = top.plot(grid, limit, color=_INK, linewidth=1.3, linestyle=(0, (4, 2)), zorder=2)[0]
    top.fill_between(grid, limit, limit.min() / 10, color="#f2f2f2", zorder=0)
    bottom.axhline(1.0, color=_INK, linewidth=1.3, linestyle=(0, (4, 2)), zorder=2)
    for series in _series(rows):
        for name, style in _STYLES.items():
            points = [(row, timing) for row in series if (timing := row.timing_of(name)) is not None]
            if not points:
                continue
            x = [row.moved_bytes for row, _ in points]
            y = [timing.median_ns / 1e3 for _, timing in points]
            spread = [
                [max(t.median_ns - t.ci_low_ns, 0) / 1e3 for _, t in points],
                [max(t.ci_high_ns - t.median_ns, 0) / 1e3 for _, t in points],
            ]
            look = {"color": style.color, "marker": style.marker, "markersize": style.size, "linewidth": style.width}
            look |= {"markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 4 if style.width > 1.5 else 3}
            handles[name] = top.plot(x, y, **look)[0]
            top.errorbar(x, y, yerr=spread, fmt="none", ecolor=style.color, elinewidth=0.9, capsize=1.5, zorder=3)
            bottom.plot(x, [row.limit_ns / 1e3 / t for (row, _), t in zip(points, y, strict=True)], **look)
    top.set_xscale("log")
    top.set_yscale("log")
    top.set_xlim(low, high)
    slowest = max(e.timing.median_ns for row in rows for e in row.entrants if e.timing is not None)
    top.set_ylim(limit.min() * 0.7, max(slowest / 1e3, float(limit.max())) * 2.5)
    bottom.set_ylim(0, 1.12)
    bottom.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    bottom.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _size(value)))
    bottom.xaxis.set_minor_formatter(NullFormatter())
    # Over a decade or less, powers of ten alone would leave an axis with one label.
    if high / low < 40:
        bottom.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (top, bottom):
        axis.grid(visible=True, which="major", color=_FAINT, linewidth=0.6, zorder=1)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors="#444444", labelsize=8.5)


def _size(value: float) -> str:
    """``50 MB``: a tick needs no decimals."""
    number, _, unit = units.size(value).partition(" ")
    return f"{float(number.replace(',', '')):g} {unit}"


def _series(rows: Sequence[BenchRow]) -> list[list[BenchRow]]:
    """Split rows into lines: what is swept is the size with the most values, the other sizes are the same along a line."""
    letters = [letter for letter, _ in rows[0].sizes]
    swept = max(letters, key=lambda letter: len({dict(row.sizes)[letter] for row in rows}))
    groups: dict[tuple[tuple[str, int], ...], list[BenchRow]] = {}
    for row in rows:
        groups.setdefault(tuple(item for item in row.sizes if item[0] != swept), []).append(row)
    return [sorted(group, key=lambda row: row.moved_bytes) for group in groups.values()]
