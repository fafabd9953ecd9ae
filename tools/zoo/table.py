"""One row for each workload of the zoo, read from its run's report, and the table and picture of all rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

TOOK_TOO_LONG = -1
"""In place of an exit code."""
ENDED_WELL = ("applied", "unchanged")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One workload.

    Attributes:
        name: of the workload.
        family: its heading.
        status: ``applied``, ``unchanged``, or how the run failed.
        seconds: the whole process.
        is_alone: no other workload ran on its GPU meanwhile; else the seconds are waiting for others too.
        answer_s: from the loaded model to our result against eager, ahead of the other ways to run the step.
        compile_s: first call of torch.compile's reduce-overhead, with empty caches, in the same run.
        eager_ms: the step in eager.
        ours_ms: the step as it is now.
        peer: name of the fastest other way to run the step.
        peer_ms: its step.
        ratio: ours over the fastest other way; 0.9 is 10 % less time.
        chains_share: of the captured step's device time, before.
        kept: rewrites that stay.
        peak_bytes: of ours on a GPU.
        refused: chains without a kernel, by the code of the reason.
        predicted_ns: savings that were predicted, of what was kept.
        predicted_low_ns: lower ends of these predictions' intervals; empty where a report has none.
        predicted_high_ns: upper ends.
        measured_ns: the same savings, measured.
        detail: why there is no figure.
    """

    name: str
    family: str
    status: str
    seconds: float
    is_alone: bool = True
    answer_s: float = 0.0
    compile_s: float = 0.0
    eager_ms: float = 0.0
    ours_ms: float = 0.0
    peer: str = ""
    peer_ms: float = 0.0
    ratio: float = 0.0
    chains_share: float = 0.0
    kept: int = 0
    peak_bytes: int = 0
    refused: Mapping[str, int] | None = None
    predicted_ns: Sequence[int] = ()
    predicted_low_ns: Sequence[int] = ()
    predicted_high_ns: Sequence[int] = ()
    measured_ns: Sequence[int] = ()
    detail: str = ""


def row_of(
    name: str, family: str, folder: Path, *, code: int, seconds: float, last_words: str = "", is_alone: bool = True
) -> Row:  # fmt: skip
    """Return the row of a run.

    Args:
        name: of the workload.
        family: its heading.
        folder: of the run.
        code: its exit code, or :data:`TOOK_TOO_LONG`.
        seconds: that it took.
        last_words: what it printed last.
        is_alone: no other workload ran on its GPU meanwhile.
    """
    plain = Row(name=name, family=family, status="", seconds=round(seconds, 1), is_alone=is_alone)
    report = folder / "report.json"
    if code != 0 or not report.is_file():
        status = "took too long" if code == TOOK_TOO_LONG else f"exit code {code}"
        return Row(**{**asdict(plain), "status": status, "detail": " ".join(last_words.split())})
    return Row(**{**asdict(plain), **_figures(json.loads(report.read_text(encoding="utf-8")))})


def _figures(report: Mapping[str, Any]) -> dict[str, Any]:
    eager, ours = (report[side]["wall"]["median_ns"] for side in ("before", "after"))
    rewrites = [*report["fusions"], *report["rewrites"]]
    kept = [one for one in rewrites if one["status"] == "kept"]
    others = [row for row in report["baselines"] if row.get("step") and not row["name"].startswith("ours")]
    best = min(others, key=lambda row: row["step"]["wall"]["median_ns"], default=None)
    best_ns = best["step"]["wall"]["median_ns"] if best else eager
    refused: dict[str, int] = {}
    for answer in report["answers"]:
        if answer.get("code"):
            refused[answer["code"]] = refused.get(answer["code"], 0) + 1
    both = [one for one in kept if one.get("predicted_saving_ns") and one.get("step_delta_ns")]
    return {
        "status": "applied" if kept else "unchanged",
        "answer_s": round(report["answer_s"] or sum(seconds for _, seconds in report["durations_s"]), 1),
        "compile_s": next((row["first_call_s"] for row in others if row["name"].endswith("reduce-overhead")), 0.0),
        "eager_ms": eager / 1e6,
        "ours_ms": ours / 1e6,
        "peer": best["name"] if best else "eager",
        "peer_ms": best_ns / 1e6,
        "ratio": ours / best_ns,
        "chains_share": sum(chain["share"] for chain in report["chains"]),
        "kept": len(kept),
        "peak_bytes": report["after"]["peak_memory_bytes"],
        "refused": refused,
        "predicted_ns": [one["predicted_saving_ns"] for one in both],
        **_intervals(both),
        "measured_ns": [-one["step_delta_ns"] for one in both],
    }


def _intervals(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Both ends of predictions' intervals; nothing where one has none, for the lists are read in step."""
    ends = ("predicted_low_ns", "predicted_high_ns")
    is_known = all(row.get(end) is not None for row in rows for end in ends)
    return {end: [row[end] for row in rows] if is_known else [] for end in ends}


def line(row: Row) -> str:
    """Return a row in one line of text."""
    if row.status not in ENDED_WELL:
        return f"{row.name}: {row.status}, {row.seconds:.0f} s. {row.detail}"
    return f"{row.name}: {row.ours_ms:.2f} ms, {row.ratio:.2f} of {row.peer} ({row.peer_ms:.2f} ms); {row.kept} kept; " + (
        f"answer after {row.answer_s:.0f} s, torch.compile's first call {row.compile_s:.0f} s"
        if row.is_alone
        else f"{row.seconds:.0f} s beside others"
    )


def summary(rows: Sequence[Row]) -> str:
    """Return what all rows say together."""
    good = [row for row in rows if row.status in ENDED_WELL]
    said = [f"{len(good)} of {len(rows)} workloads ended well"]
    if good:
        slower = [row.name for row in good if row.ratio > 1]
        said += [
            f"geometric mean of ours / best other way {geometric_mean(row.ratio for row in good):.2f}",
            f"slower than another way: {', '.join(slower) or 'none'}",
        ]
        answers = [row.answer_s for row in good if row.is_alone]
        said += [f"median time to an answer {median(answers):.0f} s"] if answers else []
    missed = [
        abs(predicted - measured) / abs(measured)
        for row in good
        for predicted, measured in zip(row.predicted_ns, row.measured_ns, strict=True)
        if measured
    ]
    if missed:
        covered = [
            low <= measured <= high
            for row in good
            if row.predicted_low_ns
            for low, high, measured in zip(row.predicted_low_ns, row.predicted_high_ns, row.measured_ns, strict=True)
        ]
        within = f", {sum(covered)} of {len(covered)} within their intervals" if covered else ""
        said.append(f"predictions missed by {median(missed):.0%} (median of {len(missed)}){within}")
    return "; ".join(said) + "."


def markdown(rows: Sequence[Row]) -> str:
    """Return the table, the worst ratio first."""
    head = (
        "| Workload | Family | Eager | Best other way | Ours | Ours / best | Chains before | Kept | Answer "
        "| compile | Refused |\n"
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|\n"
    )
    body = []
    for row in sorted(rows, key=lambda row: -row.ratio):
        if row.status not in ENDED_WELL:
            body.append(f"| {row.name} | {row.family} | | | **{row.status}** | | | | {row.seconds:.0f} s | | |")
            continue
        seconds = f"{row.answer_s:.0f} s | {row.compile_s:.0f} s" if row.is_alone else "– | –"
        refused = ", ".join(f"{code} × {count}" for code, count in sorted((row.refused or {}).items()))
        body.append(
            f"| {row.name} | {row.family} | {row.eager_ms:.2f} ms | {row.peer_ms:.2f} ms ({row.peer}) "
            f"| {row.ours_ms:.2f} ms | {row.ratio:.2f} | {row.chains_share:.0%} | {row.kept} | {seconds} | {refused} |"
        )
    return f"{summary(rows)}\n\n{head}" + "\n".join(body) + "\n"


_LEFT, _WIDTH, _STEP = 230, 720, 18


def picture(rows: Sequence[Row]) -> str:
    """Return a bar for each ratio, against a line at 1: shorter is better."""
    good = sorted((row for row in rows if row.status in ENDED_WELL), key=lambda row: row.ratio)
    most = max([1.2, *(row.ratio for row in good)])
    scale = (_WIDTH - _LEFT - 50) / most
    height = _STEP * len(good) + 30
    bars = []
    for number, row in enumerate(good):
        top, colour = 20 + number * _STEP, "#b3261e" if row.ratio > 1 else "#1a7f37"
        bars.append(
            f'<text x="{_LEFT - 8}" y="{top + 11}" text-anchor="end">{escape(row.name)}</text>'
            f'<rect x="{_LEFT}" y="{top}" width="{row.ratio * scale:.1f}" height="12" fill="{colour}"/>'
            f'<text x="{_LEFT + row.ratio * scale + 5:.1f}" y="{top + 11}">{row.ratio:.2f}</text>'
        )
    one = _LEFT + scale
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="#ffffff"/><text x="{_LEFT}" y="13">our time / best other way</text>'
        f'{"".join(bars)}<line x1="{one:.1f}" x2="{one:.1f}" y1="16" y2="{height}" stroke="#57606a" stroke-dasharray="3 3"/>'
        "</svg>\n"
    )


def write(to: Path, rows: Sequence[Row]) -> None:
    """Write ``zoo.json``, ``zoo.md`` and ``zoo.svg``."""
    to.mkdir(parents=True, exist_ok=True)
    (to / "zoo.json").write_text(json.dumps([asdict(row) for row in rows], separators=(",", ":")) + "\n", encoding="utf-8")
    (to / "zoo.md").write_text(markdown(rows), encoding="utf-8")
    (to / "zoo.svg").write_text(picture(rows), encoding="utf-8")
