"""Sums up what ``tools.measure_ranges`` wrote: ``python -m tools.ranges_table FILE.jsonl …`` prints markdown.

Times of different stages are compared where both have a call of the same sizes.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def rows_in(path: Path) -> list[Row]:
    """Return a file's rows; a last line that was cut off is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def table(name: str, rows: Sequence[Row]) -> str:
    """Return one file's figures as markdown.

    Args:
        name: of the file.
        rows: in it.
    """
    lines = [f"### {name}", "", "| Call | Against | Calls | Time, geometric mean | Best to worst |", "|---|---|--:|--:|---|"]
    served = [row for row in rows if row.get("stage") == "serve" and row["what"] == "call"]
    for call in dict.fromkeys(row["call"] for row in served):
        own = [row for row in served if row["call"] == call]
        title = call or "forward"
        lines.append(_ratios(f"{title}, ours", "eager", [(_late(row["ours_s"]), _late(row["eager_s"])) for row in own]))
        for key, way in (("is_replayed", "in a CUDA graph"), ("is_in_segments", "with parts in CUDA graphs")):
            replayed = [row for row in own if row.get(key)]
            if replayed and len(replayed) < len(own):
                pairs = [(_late(row["ours_s"]), _late(row["eager_s"])) for row in replayed]
                lines.append(_ratios(f"{title}, ours {way}", "eager", pairs))
        lines += _against(f"{title}, ours", own, [row for row in rows if row.get("stage") == "compile"])
    exact = [row for row in rows if row.get("stage") == "exact" and row["what"] == "call"]
    if exact:
        pairs = [(_late(row["ours_s"]), _late(row["exact_s"])) for row in exact]
        lines.append(_ratios("ours", "a plan of exactly these sizes", pairs))
    lines += ["", *_facts(rows, served)]
    return "\n".join(lines)


def _against(title: str, own: Iterable[Row], others: Iterable[Row]) -> list[str]:
    """Compare with the calls of torch.compile that have the same sizes."""
    times = {
        (row["call"], json.dumps(row["sizes"])): _late(value)
        for row in others
        if row["what"] == "call"
        for key, value in row.items()
        if key.startswith("compile ")
    }
    keys = [((row["call"], json.dumps(row["sizes"])), _late(row["ours_s"])) for row in own]
    pairs = [(ours, times[key]) for key, ours in keys if key in times]
    return [_ratios(title, "torch.compile, dynamic", pairs)] if pairs else []


def _facts(rows: Sequence[Row], served: Sequence[Row]) -> list[str]:
    """Return a line for everything that is no ratio."""
    found = [f"- {row['what']}: {row['seconds']:.1f} s" for row in rows if row["what"] in ("model", "loaded")]
    if served:
        last = served[-1]
        first_s = _middle(row["ours_s"][0] for row in served if not row["is_ours_first"])
        fallbacks = sum(row["fallbacks"] > 0 for row in served)
        found.append(
            f"- {len(served)} calls: dynamo traced {last['traces']} graphs, {last['kernels_compiled']} kernels compiled, "
            f"{fallbacks} calls ran the original ops, largest relative error {max(row['rel_l2'] for row in served):.1e}, "
            f"first use after eager {first_s:.3f} s (median)"
        )
    for row in rows:
        if row["what"] == "generate":
            found.append(f"- generate, {row['way']}: {row['tokens_per_s']:.0f} tokens/s over {len(row['seconds'])} prompts")
        elif row["what"] == "tokens":
            found.append(f"- tokens, {row['way']}: {row['same_as_eager']} of {row['prompts']} prompts as eager's")
        elif row["what"] == "end":
            found.append(f"- at the end: fallbacks {row['fallbacks']}, {row['held_bytes'] / 1e9:.1f} GB held; {row['graphs']}")
        elif row["what"] == "failed":
            found.append(f"- {row['stage']} failed: {row['error']}")
    return found


def _ratios(title: str, other: str, pairs: Sequence[tuple[float, float]]) -> str:
    ratios = [ours / theirs for ours, theirs in pairs]
    span = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"| {title} | {other} | {len(ratios)} | {statistics.geometric_mean(ratios):.2f} | {span} |"


def _late(times: Sequence[float]) -> float:
    """Return the median of a way's later calls."""
    return times[-1]


def _middle(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else float("nan")


def main() -> None:
    """Print the tables of the files that are named."""
    print("\n\n".join(table(path.stem, rows_in(path)) for path in map(Path, sys.argv[1:])))


if __name__ == "__main__":
    main()
