"""Measures ``fleet`` over growing numbers of traces: seconds, processor time, MB of JSON, memory of the largest worker.

Run: ``python -m tools.make_fleet DIR --count 2000 --broken 20 --hostile 5 --launches 300``, then
``python -m tools.measure_fleet DIR 10 50 200 1000 2000 --json figures.json --chart figures.svg``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from fusion_advisor.fleet.run import FleetOptions, State, run_fleet


def measure(traces: list[Path], engine: str, processes: int) -> dict[str, Any]:
    """Run a fleet into an empty folder and return its figures."""
    states: list[State] = []
    with tempfile.TemporaryDirectory() as folder:
        patterns = tuple(str(path) for path in traces)
        options = FleetOptions(patterns=patterns, output=Path(folder), engine=engine, processes=processes)
        began = time.monotonic()
        report = run_fleet(options, states.append)
        seconds = time.monotonic() - began
        began = time.monotonic()
        run_fleet(options)
        again = time.monotonic() - began
        parts_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*.parquet"))
    last = states[-1]
    return {
        "traces": len(traces),
        "failed": len(report.failed),
        "engine": engine,
        "seconds": round(seconds, 1),
        "cpu_s": round(last.cpu_ns / 1e9, 1),
        "json_mb": round(last.json_bytes / 1e6, 1),
        "mb_per_core_s": round(last.json_bytes / 1e6 / (last.cpu_ns / 1e9), 1),
        "peak_worker_mb": round(last.peak_bytes / 1e6),
        "parts_mb": round(parts_bytes / 1e6, 2),
        "again_s": round(again, 1),
    }


def main() -> None:
    """Measure each count of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("counts", type=int, nargs="+")
    parser.add_argument("--engine", default="local")
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path)
    asked = parser.parse_args()
    found = sorted(asked.folder.rglob("*.json.gz"))
    step = {count: max(1, len(found) // count) for count in asked.counts}
    rows = []
    for count in asked.counts:
        rows.append(measure(found[:: step[count]][:count], asked.engine, asked.processes))
        print(json.dumps(rows[-1]), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    if asked.chart:
        draw(rows, asked.chart)


def draw(rows: list[dict[str, Any]], to: Path) -> None:
    """Draw processor time over the size of the JSON, both on logarithmic axes, with a line of constant cost through the last."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "fleet", "svg.fonttype": "none"})
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axis = figure.add_subplot(xscale="log", yscale="log", xlabel="MB of JSON", ylabel="processor time of all workers, s")
    sizes, times = [row["json_mb"] for row in rows], [row["cpu_s"] for row in rows]
    axis.plot(sizes, [size * times[-1] / sizes[-1] for size in sizes], color="#999999", linewidth=1, label="linear")
    axis.plot(sizes, times, "o", color="#1f6feb", label="measured")
    for row, size, time_s in zip(rows, sizes, times, strict=True):
        at = {"textcoords": "offset points", "xytext": (-8, 5), "ha": "right", "fontsize": 9}
        axis.annotate(f"{row['traces']:,} traces", (size, time_s), **at)
    axis.margins(x=0.2)
    axis.grid(visible=True, color="#e6e6e6", linewidth=0.6)
    axis.legend(frameon=False)
    figure.savefig(to, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
