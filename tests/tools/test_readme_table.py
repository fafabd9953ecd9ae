"""What the README says of models is what the committed runs say."""

from __future__ import annotations

from fusion_advisor.records.serialize import read_report
from tools.readme_table import README, ROOT, linked, rewritten


def test_every_committed_run_has_its_line_and_every_line_its_figures() -> None:
    runs = []
    for line in README.read_text(encoding="utf-8").split("\n"):
        run = linked(line)
        if run is not None:
            runs.append(run.name)
            assert line == rewritten(line, read_report(run / "report.json")), "python -m tools.readme_table writes it"
    assert len(runs) == len(set(runs))
    assert set(runs) == {path.parent.name for path in (ROOT / "reports" / "examples").glob("*/report.json")}


def test_a_line_is_told_by_its_link_and_keeps_its_names() -> None:
    line = "| Qwen | bf16, 1 × 2048 | 1 | 2 | 3 | 4 | 5 | [report](reports/examples/qwen2.5-7b-bf16-1x2048-h200/report.md) |"
    run = linked(line)
    assert run is not None and linked("| a | b |") is None
    new = rewritten(line, read_report(run / "report.json"))
    assert new.startswith("| Qwen | bf16, 1 × 2048 | ") and new.endswith(
        " | [report](reports/examples/" + run.name + "/report.md) |"
    )
    assert new != line
