"""Findings and attention backends in every view: the gain and whether it was measured, and the line to copy."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from fusion_advisor.records import Finding
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.report import quality, shared_rows
from fusion_advisor.report.html.page import render_html
from fusion_advisor.report.markdown import render_markdown
from fusion_advisor.report.terminal.result import result_table
from tests.report.fixtures import HOSTILE, profiled

TF32 = Finding(
    id="N1",
    title="fp32 GEMMs run without TF32",
    reason="49 GEMMs",
    change="torch.set_it()",
    gain_ns=2_000_000,
    is_measured=False,
    share=0.25,
)


def with_findings(*findings):
    report = profiled()
    before = replace(report.before, attention=(("cudnn", 28, 322_000),))
    captured = replace(report.captured or report.before, label="captured", attention=(("math", 56, 4_100_000),))
    return replace(report, findings=findings, before=before, captured=captured)


def terminal(report):
    stream = io.StringIO()
    console = Console(file=stream, width=200, color_system=None, highlight=False, markup=False)
    console.print(result_table(report, console))
    return stream.getvalue()


def test_every_view_shows_the_gain_and_the_change():
    report = with_findings(TF32)
    for text in (terminal(report), render_markdown(report), render_html(report)):
        assert "fp32 GEMMs run without TF32: at most 2.00 ms of device time (25.0%)" in text.replace("\u202f", " ")
        assert "torch.set_it()" in text.replace("\\_", "_")


def test_a_measured_gain_is_no_bound():
    ((title, _, _),) = shared_rows.finding_lines(with_findings(replace(TF32, is_measured=True)))
    assert "2.00 ms measured" in title
    assert "at most" not in title


def test_without_findings_nothing_is_said():
    report = with_findings()
    assert "Without any kernel" not in terminal(report)
    assert "Without any kernel" not in render_markdown(report)
    assert 'id="findings"' not in render_html(report)


def test_the_backends_of_attention_stand_side_by_side():
    line = shared_rows.attention_line(with_findings())
    assert line.index("eager cudnn (28 kernels") < line.index("captured math (56 kernels")
    assert line in quality.verdict(with_findings())[1]
    assert line in terminal(with_findings())
    assert shared_rows.attention_line(profiled()) == ""


def test_hostile_text_stays_text():
    report = with_findings(replace(TF32, title=HOSTILE, reason=HOSTILE, change=HOSTILE))
    html = render_html(report)
    assert "<img" not in html
    assert "\u202e" not in html
    assert "\x1b" not in terminal(report)
    in_prose = with_findings(replace(TF32, title=HOSTILE, reason=HOSTILE))
    assert "<img" not in render_markdown(in_prose).replace("\\<img", "")


def test_findings_read_back():
    report = with_findings(TF32)
    assert load_report(dump_report(report)) == report
