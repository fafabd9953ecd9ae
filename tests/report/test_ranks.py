"""A run on several ranks in the terminal, markdown and HTML: a row for each rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from fusion_advisor.records import RankRun, RankTime, Report
from fusion_advisor.records.serialize import REPORT_SCHEMA, dump_report, load_record
from fusion_advisor.report.html.page import render_html
from fusion_advisor.report.markdown import render_markdown
from fusion_advisor.report.ranks.rows import ranks_view
from fusion_advisor.report.terminal.result import result_table
from tests.report.fixtures import applied, profiled

ROWS = tuple(
    RankTime(
        rank=rank, device=f"cuda:{rank} (NVIDIA H100)", compute_ns=(8 + rank) * 1_000_000, communication_ns=700_000,
        waiting_ns=1_000_000 - 1_000_000 * rank, idle_ns=50_000,
    )
    for rank in range(2)
)  # fmt: skip
RUN = RankRun(way="tensor parallel", rows=ROWS)


def test_the_sentence_says_how_ranks_share_and_who_computes_longest():
    view = ranks_view(RUN)
    assert view.summary == "2 ranks share each step (tensor parallel). Rank 1 computes 12.5% longer than rank 0."
    assert view.rows[0] == ("0", "cuda:0 (NVIDIA H100)", "8.00 ms", "700 µs", "1.00 ms", "50.0 µs")
    assert "2 ranks run a whole model each" in ranks_view(replace(RUN, way="replicas")).summary
    assert ranks_view(None) is None


@pytest.mark.parametrize("make", [applied, profiled])
def test_each_view_has_a_row_for_each_rank(make):
    alone, report = make(), replace(make(), ranks=RUN)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(result_table(report, console))
    views = {"terminal": captured.get(), "markdown": render_markdown(report), "html": render_html(report)}
    for name, text in views.items():
        assert "cuda:1 (NVIDIA H100)" in text.replace("\\", "") and "Communication" in text, name
    assert 'id="ranks"' in views["html"] and 'id="ranks"' not in render_html(alone)
    assert "Communication" not in render_markdown(alone)


def test_the_record_survives_its_file():
    report = replace(applied(), ranks=RUN)
    assert load_record(Report, dump_report(report), schema=REPORT_SCHEMA, name="report.json").ranks == RUN
