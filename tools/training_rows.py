"""Time training steps beside the other ways to run them: ``python -m tools.training_rows -o DIR [ROW ...] [-- OPTIONS]``.

A row is one of the names below, or MODEL:BATCH or MODEL:BATCHxTOKENS. Each is an ``apply --phase train --max-autotune`` in a
process of its own, one after another. A second call goes on with the rows that have no finished report; a run that is cut off
leaves a row of what it had measured. After each row DIR has ``rows.json`` and ``rows.md``.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fusion_advisor.errors import UnreadableReport
from fusion_advisor.records import COMPILED, EAGER, OURS, Baseline, Report, Timing
from fusion_advisor.records.serialize import read_report
from fusion_advisor.report.training.way_rows import best_way, time_of

WAYS = {
    EAGER: "Eager", f"{COMPILED}default": "compile", f"{COMPILED}max-autotune-no-cudagraphs": "max-autotune", "Liger": "Liger",
    OURS: "Ours",
}  # fmt: skip
"""Columns of the table, by the names of the report."""
WORDS = ("--phase", "train", "--weights", "random", "--dtype", "bf16", "--offline", "--drop-logits")
"""Of every row's command."""
_PATIENCE_S = 30.0
"""For a run to write what it has, after the interrupt at its limit."""


@dataclass(frozen=True, slots=True)
class Row:
    """One step to time."""

    name: str
    model: str
    batch: int
    tokens: int | None = None
    """None: the model's own size, of images."""


ROWS = (
    Row("llama-3.2-1b", "meta-llama/Llama-3.2-1B", 4, 2048),
    Row("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", 4, 2048),
    Row("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B", 4, 2048),
    Row("gpt2", "openai-community/gpt2", 32, 1024),
    Row("bert-large", "google-bert/bert-large-uncased", 64, 128),
    Row("vit-base", "google/vit-base-patch16-224", 64),
)


def row_of(text: str) -> Row:
    """Read a row of the command line.

    Args:
        text: a name, or MODEL:BATCH or MODEL:BATCHxTOKENS.

    Raises:
        ValueError: it is neither.
    """
    if found := next((row for row in ROWS if row.name == text), None):
        return found
    model, separator, size = text.rpartition(":")
    batch, _, tokens = size.partition("x")
    if not separator or not model:
        raise ValueError(f"{text} is no row: there are {', '.join(row.name for row in ROWS)}, and MODEL:BATCHxTOKENS")
    return Row(text.replace("/", "-").replace(":", "-"), model, int(batch), int(tokens) if tokens else None)


def command(row: Row, folder: Path, options: Sequence[str]) -> list[str]:
    """Return the command that times a row."""
    size = ["--batch", str(row.batch), *(["--seq-len", str(row.tokens)] if row.tokens else [])]
    words = [sys.executable, "-m", "fusion_advisor", "apply", row.model, *size, *WORDS, *options]
    return [*words, "-o", str(folder), "--force"]


def run(row: Row, to: Path, options: Sequence[str], limit_s: float, words_of: Callable[..., list[str]] = command) -> int:
    """Run a row, or end it at its limit so that it writes what it has; returns its exit code."""
    with (to / f"{row.name}.txt").open("w", encoding="utf-8") as printed:
        # A shell starts what runs in the background deaf to interrupts, and a child inherits that.
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            process = subprocess.Popen(words_of(row, to / row.name, options), stdout=printed, stderr=subprocess.STDOUT)
        finally:
            signal.signal(signal.SIGINT, before)
        # The first interrupt waits for what is at work, the second does not.
        for patience_s in (limit_s, _PATIENCE_S, _PATIENCE_S):
            try:
                return process.wait(timeout=patience_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
        process.kill()  # a compiler in C++ hears no interrupt
        return process.wait()


def report_of(row: Row, to: Path) -> Report | None:
    """Return a row's report, finished or not; None where there is none."""
    path = to / row.name / "report.json"
    try:
        return read_report(path) if path.is_file() else None
    except UnreadableReport:
        return None


def is_done(report: Report | None) -> bool:
    """Whether a row need not run again."""
    return report is not None and report.status == "applied"


def figures(row: Row, report: Report | None) -> dict[str, Any]:
    """Return what the JSON holds of a row: times in ms, memory in GiB."""
    base: dict[str, Any] = {**asdict(row), "status": "no report" if report is None else report.status}
    if report is None:
        return base
    if not report.baselines:  # it ended ahead of them
        report = replace(report, baselines=(Baseline(name=EAGER, step=report.before),))
    best, own = best_way(report), next((one for one in report.baselines if one.name == OURS), None)
    parts = report.training.parts if report.training else None
    return {
        **base, "device": report.environment.device_name, "torch": report.environment.torch, "dtype": report.workload.dtype,
        "is_kept": report.after is not None and report.after.label == "fused",
        "state_gib": round(parts.state_bytes / 2**30, 2) if parts else 0.0,
        "ways": {one.name: _way(one) for one in report.baselines},
        "best_other": best.name if best and best.name != OURS else "",
        "ratio": _ratio(time_of(own), time_of(best)) if own and best else None,
        "ratio_of_step": _ratio(_step(own), _step(best)) if own and best else None,
    }  # fmt: skip


def _way(one: Baseline) -> dict[str, Any]:
    step = one.step
    return {
        "step_ms": _ms(_step(one)), "with_adamw_ms": _ms(one.with_optimizer),
        "peak_gib": round(step.peak_memory_bytes / 2**30, 2) if step else None,
        "with_adamw_peak_gib": round(one.optimizer_peak_bytes / 2**30, 2), "first_call_s": one.first_call_s,
        "check": None if one.check is None else asdict(one.check), "is_right": one.is_right, "note": one.note,
    }  # fmt: skip


def _step(one: Baseline) -> Timing | None:
    return one.step.wall if one.step is not None else None


def _ms(timing: Timing | None) -> float | None:
    return None if timing is None else round(timing.median_ns / 1e6, 3)


def _ratio(own: Timing | None, other: Timing | None) -> float | None:
    return None if own is None or other is None else round(own.median_ns / max(other.median_ns, 1), 3)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a markdown table."""
    lines = [
        f"| Model | Batch | {' | '.join(WAYS.values())} | Ours / best other | AdamW's state | Loss and gradients |",
        f"|:--|:--|{'--:|' * (len(WAYS) + 2)}:--|",
    ]
    for row in rows:
        size = f"{row['batch']}" + (f" x {row['tokens']:,}" if row["tokens"] else "")
        if "ways" not in row:
            lines.append(f"| {row['model']} | {size} |{' – |' * (len(WAYS) + 2)} {row['status']} |")
            continue
        ways = row["ways"]
        cells = [_cell(ways.get(name)) for name in WAYS]
        wrong = [f"{WAYS.get(name, name)} wrong: {one['check']['reason']}" for name, one in ways.items() if not one["is_right"]]
        checked = [one["is_right"] for one in ways.values() if one["check"] is not None]
        said = "; ".join([f"{sum(checked)} of {len(checked)} as eager's" if checked else "not checked", *wrong])
        cut = "" if row["status"] == "applied" else f"; {row['status']}"
        kept = "" if row["is_kept"] or cut else "; eager stays"
        ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f} ({row['best_other']})"
        state = f"{row['state_gib']:.1f} GiB"
        lines.append(f"| {row['model']} | {size} | {' | '.join(cells)} | {ratio} | {state} | {said}{kept}{cut} |")
    legend = (
        "Milliseconds of forward, loss and backward, then with a step of AdamW (`fused=True`) after it, and the step's peak "
        "memory without AdamW's state. The ratio is of times with AdamW. A dash: not measured; the reports say why."
    )
    return "\n".join([*lines, "", legend, ""])


def _cell(way: dict[str, Any] | None) -> str:
    if way is None or way["step_ms"] is None:
        return "–"
    whole = "–" if way["with_adamw_ms"] is None else f"{way['with_adamw_ms']:.1f}"
    memory = f", {way['peak_gib']:.1f} GiB" if way["peak_gib"] else ""
    return f"{way['step_ms']:.1f}, {whole}{memory}{'' if way['is_right'] else ' (wrong)'}"


def write(rows: Sequence[Row], to: Path) -> None:
    """Write the table and the figures of all rows that have been run."""
    found = [figures(row, report) for row in rows if (report := report_of(row, to)) or (to / f"{row.name}.txt").is_file()]
    (to / "rows.json").write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    (to / "rows.md").write_text(table(found), encoding="utf-8")


def main(arguments: Sequence[str] | None = None, runner: Callable[..., int] = run) -> int:
    """Run the rows of the command line; returns how many have no finished report."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"none: all of {', '.join(row.name for row in ROWS)}")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for one row; then it is interrupted")
    parser.add_argument("--for", type=float, default=float("inf"), dest="total", help="seconds for all; no row goes past them")
    parser.add_argument(
        "--no-max-autotune", action="store_true", help="leave torch.compile's slowest mode out: minutes for each row"
    )
    asked = parser.parse_args(words[:split])
    # --quick times other ways only where one of these asks for them.
    options = [*(["--baseline", "compile"] if asked.no_max_autotune else ["--max-autotune"]), *words[split + 1 :]]
    try:
        rows = [row_of(text) for text in asked.rows] or list(ROWS)
    except ValueError as error:
        parser.error(str(error))
    to, began = asked.output.resolve(), time.monotonic()
    to.mkdir(parents=True, exist_ok=True)
    for row in rows:
        left_s = asked.total - (time.monotonic() - began) - 2 * _PATIENCE_S
        if is_done(report_of(row, to)) or left_s <= 0:
            continue
        code = runner(row, to, options, min(asked.limit, left_s))
        print(f"{row.name}: exit code {code}", flush=True)
        write(rows, to)
    write(rows, to)
    print((to / "rows.md").read_text(encoding="utf-8"))
    return sum(not is_done(report_of(row, to)) for row in rows)


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
