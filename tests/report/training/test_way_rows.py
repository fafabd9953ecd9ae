"""The ways to run a training step as rows: with AdamW behind each, and one that computes something else."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from fusion_advisor.records import COMPILED, EAGER, OURS, Baseline, StepCheck, StepParts
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.report import baseline_rows
from fusion_advisor.report.html.page import render_html
from fusion_advisor.report.markdown import render_markdown
from fusion_advisor.report.tables import csv_text, table
from fusion_advisor.report.terminal.result import result_table
from fusion_advisor.report.training.way_rows import best_way, way_rows, way_table
from tests.report.fixtures import HOSTILE, timing, trained

MS = 1_000_000
CHECK = StepCheck(
    oracle="float32", loss=12.2019, eager_loss=12.2019, gradients=3, rel_l2=2e-3, eager_rel_l2=2e-3, worst="w",
    worst_rel_l2=2e-3, worst_eager_rel_l2=2e-3,
)  # fmt: skip


def with_ways():
    """A step that was run in every way: one peer computes something else, one was given up."""
    base = trained()

    def way(name, step_ms, whole_ms, check=CHECK, peak=8 << 30):
        step = replace(base.before, wall=timing(step_ms * MS, method="wall"), peak_memory_bytes=peak)
        whole = timing(whole_ms * MS, method="wall") if whole_ms else None
        return Baseline(name=name, step=step, with_optimizer=whole, optimizer_peak_bytes=peak + 1 if whole else 0, check=check)

    rows = (
        way(EAGER, 96, 100), way(f"{COMPILED}default", 78, 82, replace(CHECK, rel_l2=1e-3)),
        way("Liger", 60, 64, replace(CHECK, loss=14.2, reason="its loss is 14.206, eager's 12.202")),
        Baseline(name=f"{COMPILED}max-autotune-no-cudagraphs", note="it was not ready after 900 s and was given up"),
        way(OURS, 70, 75, replace(CHECK, rel_l2=3e-3)),
    )  # fmt: skip
    parts = StepParts(
        forward_before_ns=MS, backward_before_ns=MS, tokens=8192, token_word="tokens", flops=50_000_000_000_000,
        state_bytes=5 << 30,
    )  # fmt: skip
    return replace(
        base, baselines=rows, training=replace(base.training, parts=parts), workload=replace(base.workload, dtype="bf16"),
        environment=replace(base.environment, device_name="NVIDIA H200"), before=replace(base.before, wall=rows[0].step.wall),
        after=replace(base.after, wall=rows[-1].step.wall),
    )  # fmt: skip


@pytest.fixture
def report():
    return with_ways()


def test_each_way_has_both_times_its_rate_and_its_check(report):
    eager, compiled, liger, ours = way_rows(report)
    assert (eager.step, eager.whole, eager.against, ours.against) == ("96.00 ms", "100.00 ms", "1.33×", "1.000×")
    assert ours.rate == "109,227" and ours.mfu == "67.4%"
    assert compiled.check == "loss 12.202, 0.50 × eager's error" and ours.check.endswith("1.50 × eager's error")
    assert liger.is_wrong and liger.check == "wrong: its loss is 14.206, eager's 12.202" and not ours.is_wrong
    assert eager.memory == eager.whole_memory == "8.59 GB"
    best, optimizer, checked, wrong = way_table(report).lines
    assert best.startswith("Forward, backward and AdamW: ours takes 0.91 of the time of torch.compile default")
    assert (
        "Its state, 5.37 GB, comes on top of every peak" in optimizer and "in float32" in checked and wrong.endswith(": Liger.")
    )


def test_what_computes_something_else_is_no_peer(report):
    assert best_way(report).name == f"{COMPILED}default" == baseline_rows.best_peer(report)[0]
    assert "Liger" not in dict(baseline_rows.timed(report))
    right = replace(
        report, baselines=tuple(replace(row, check=replace(CHECK) if row.check else None) for row in report.baselines)
    )
    assert best_way(right).name == "Liger" == baseline_rows.best_peer(right)[0]
    wrong = replace(CHECK, reason="its loss is not finite, and eager's are")
    rows = tuple(replace(row, check=wrong) if row.name.startswith(COMPILED) and row.step else row for row in report.baselines)
    assert baseline_rows.best_compile(replace(report, baselines=rows)) is None
    assert best_way(replace(report, baselines=rows)).name == EAGER


@pytest.mark.parametrize(
    ("oracle", "words", "line"),
    [("other random numbers", "0.50 × the distance between eager's seeds", "draws random numbers"),
     ("eager", "gradients differ from eager's by 1.0e-3", "No copy of the model in a wider dtype")],
)  # fmt: skip
def test_the_measure_of_a_check_is_told(report, oracle, words, line):
    rows = tuple(replace(row, check=row.check and replace(row.check, oracle=oracle)) for row in report.baselines)
    shown = way_table(replace(report, baselines=rows))
    assert shown.rows[1].check == f"loss 12.202, {words}" and any(line in one for one in shown.lines)


def test_without_an_optimizer_and_checks_there_is_no_table(report):
    rows = tuple(replace(row, check=None, with_optimizer=None) for row in report.baselines)
    assert not way_table(replace(report, baselines=rows)).rows and not way_table(replace(report, baselines=rows)).lines
    assert not way_table(trained()).rows and not way_table(replace(report, training=None)).rows


def test_every_view_shows_the_table_and_hides_nothing_harmful(report):
    assert load_report(dump_report(report)) == report
    page, text = render_html(report), render_markdown(report)
    console = Console(width=130, file=io.StringIO())
    console.print(result_table(report, console))
    shown = console.file.getvalue()
    for view in (page, text, shown):
        assert "100.00 ms" in view and "67.4%" in view and "14.206" in view
        assert "its state, 5.37 gb" in " ".join(view.lower().split())
    assert "given up" in shown and "0.91 of the time of torch.compile default" in text
    rows = list(csv.DictReader(io.StringIO(csv_text(table(report, "baselines")))))
    assert rows[0]["with_optimizer_ns"] == str(100 * MS) and rows[2]["wrong"].startswith("its loss")
    bad = replace(report.baselines[2], name=HOSTILE, check=replace(CHECK, reason=HOSTILE))
    assert HOSTILE not in render_html(replace(report, baselines=(*report.baselines[:2], bad, *report.baselines[3:])))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_no_line_of_the_terminal_is_too_wide(report, width):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(result_table(report, console))
    lines = console.file.getvalue().splitlines()
    assert all(cell_len(line) <= width for line in lines) and any("+ AdamW" in line for line in lines)
