"""The README's table of models, from the committed runs that it links to: python -m tools.readme_table writes it."""

from __future__ import annotations

import re
from pathlib import Path

from fusion_advisor.records import COMPILED, EAGER, OURS, OURS_COMPILED, Report
from fusion_advisor.records.serialize import read_report
from fusion_advisor.report.baseline_rows import best_peer, best_rested_peer, own_rested

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
_LINK = re.compile(r"\[report\]\((reports/examples/[\w.-]+)/report\.md\)")


def figures(report: Report) -> list[str]:
    """Eager, the best other way, ours, their ratio, and ours with torch.compile; a dash where there is no figure.

    Where the power limit held steps down, the ratio of single steps after rests stands behind the other one.
    """
    walls = {row.name: row.step.wall.median_ns for row in report.baselines if row.step is not None and row.step.wall is not None}
    peer = best_peer(report)
    assert peer is not None, "a run without other ways to compare with"
    name = f"compile, {peer[0].removeprefix(COMPILED)}" if peer[0].startswith(COMPILED) else peer[0]
    ours = walls[OURS]
    rested, rested_peer = own_rested(report), best_rested_peer(report)
    after_rest = f" ({rested.median_ns / rested_peer[1].median_ns:.2f})" if rested and rested_peer else ""
    return [
        milliseconds(walls[EAGER]),
        f"{milliseconds(peer[1].median_ns)} ({name})",
        milliseconds(ours),
        f"{ours / peer[1].median_ns:.2f}{after_rest}",
        milliseconds(walls[OURS_COMPILED]) if OURS_COMPILED in walls else "–",
    ]


def milliseconds(ns: int) -> str:
    """As the table writes a time."""
    return f"{ns / 1e6:.2f} ms"


def linked(line: str) -> Path | None:
    """The run that a line of the table links to; None for any other line."""
    found = _LINK.search(line)
    return ROOT / found[1] if found else None


def rewritten(line: str, report: Report) -> str:
    """A line of the table with a run's figures between its first two cells and its link."""
    model, workload, *_, link = line.strip().strip("|").split("|")
    return f"| {' | '.join(cell.strip() for cell in (model, workload, *figures(report), link))} |"


def main() -> None:
    """Write the table anew."""
    lines = README.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines):
        run = linked(line)
        if run is not None:
            lines[number] = rewritten(line, read_report(run / "report.json"))
    README.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
