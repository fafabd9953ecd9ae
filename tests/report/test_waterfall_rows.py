"""The rows between the headline's two ends: they close, in the order of measurement, and nothing is left without a name."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from fusion_advisor.records import Fusion, GraphRewrite, Report, RewriteStage, Status
from fusion_advisor.records.serialize import read_report
from fusion_advisor.report import shared_rows
from fusion_advisor.report.html.page import render_html
from fusion_advisor.report.html.waterfall import waterfall
from fusion_advisor.report.waterfall_rows import rows, sum_line
from tests.report.fixtures import EXAMPLES, applied, on_cpu, profiled, real

REPORTS = {"applied": applied(), "real": real(), "cpu": on_cpu()} | {path.parent.name: read_report(path) for path in EXAMPLES}


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_the_rows_close_from_the_headlines_before_to_its_after(report: Report) -> None:
    found, pair = rows(report), shared_rows.step_pair(report)
    assert pair is not None
    assert (found[0].level_ns, found[-1].level_ns) == (pair[1].median_ns, pair[2].median_ns)
    for above, below in itertools.pairwise(found):
        assert below.level_ns == above.level_ns + (below.delta_ns if below.kind in ("rewrite", "other") else 0)
    tried: list[Fusion | GraphRewrite] = [*report.rewrites, *report.fusions]
    timed = [row for row in tried if row.step_delta_ns is not None]
    counted = [row for row in timed if row.status in (Status.KEPT, Status.ABSORBED)]
    assert sum(row.delta_ns for row in found if row.kind == "rewrite") == sum(row.step_delta_ns or 0 for row in counted)
    assert sum(row.kind == "removed" for row in found) == len(timed) - len(counted)
    assert all(row.name for row in found)


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_each_bar_begins_where_the_one_above_ended(report: Report) -> None:
    fall = waterfall(report)
    assert fall is not None
    for above, below in itertools.pairwise(fall.rows[:-1]):
        ends = (below.x, below.x + below.width)
        assert min(abs(above.joint - end) for end in ends) < 0.02
    assert fall.rows[-1].joint == pytest.approx(fall.rows[-2].joint, abs=0.02)


def test_rewrites_come_in_the_order_in_which_they_were_timed_and_the_cuda_graph_last() -> None:
    report = applied()

    def rewrite(number: int, name: str, stage: RewriteStage) -> GraphRewrite:
        return GraphRewrite(
            id=name, name=f"the {name}", status=Status.KEPT, reason="", sites=1, step_delta_ns=-1000 * number, stage=stage
        )

    chain = replace(report.fusions[0], id="F1", status=Status.ABSORBED, step_delta_ns=-50_000, step_delta_ci_ns=None)
    gemv = replace(chain, id="G1", chain_id="", status=Status.KEPT, step_delta_ns=-20_000)
    named = (("a-pass", RewriteStage.PASS), ("a-merge", RewriteStage.ON_TOP), ("a-graph", RewriteStage.CALL))
    shown = replace(report, rewrites=tuple(rewrite(n, *one) for n, one in enumerate(named, start=1)), fusions=(chain, gemv))
    found = [row for row in rows(shown) if row.kind == "rewrite"]
    assert [row.name.removeprefix("the ") for row in found] == ["a-pass", "F1 rms_norm", "a-merge", "G1 rms_norm", "a-graph"]
    assert found[1].note == "part of a larger kernel" and found[-1].note == "timed on the whole call"
    fall = waterfall(shown)
    assert fall is not None
    absorbed = next(row for row in fall.rows if row.note == "part of a larger kernel")
    assert f'<rect x="{absorbed.x}" y="{absorbed.y}" width="{absorbed.width}"' in render_html(shown)  # it was in the step


def test_what_no_rewrite_accounts_for_has_a_row_of_its_own() -> None:
    report = read_report(next(path for path in EXAMPLES if "llama3.1-8b-bf16-decode" in str(path)))
    host = next(row for row in rows(report) if row.name == "launch and host time")
    assert report.before is not None and report.after is not None
    launches = f"{report.before.launches:,} → {report.after.launches:,} launches"
    assert host.delta_ns < -10_000_000 and launches in host.note and host.ci_ns is None
    vision = rows(read_report(next(path for path in EXAMPLES if "vit-bf16-64" in str(path))))
    extra = next(row for row in vision if row.name == "kernels of the captured graph")
    assert extra.delta_ns > 10_000_000 and "traced" in extra.note
    assert any(row.name == "back-to-back steps instead of rested" for row in vision)
    assert f"launch and host time −{-host.delta_ns / 1e6:.2f} ms" in sum_line(report)


def test_a_run_without_a_second_side_has_no_rows() -> None:
    report = applied()
    unchanged = replace(report, after=replace(report.before, label=shared_rows.UNCHANGED))
    for shown in (profiled(), unchanged, replace(report, after=None)):
        assert rows(shown) == () and sum_line(shown) == "" and waterfall(shown) is None


def test_what_all_rewrites_save_together_is_not_called_a_second_measurement_on_a_cpu() -> None:
    report = applied()
    assert report.step_before is not None and report.step_after is not None
    by_cpu = replace(
        report, step_before=replace(report.step_before, method="cpu_time"),
        step_after=replace(report.step_after, method="cpu_time", median_ns=report.step_after.median_ns - 1000),
    )  # fmt: skip
    assert "all together in the step" in [row.name for row in rows(by_cpu)]
    assert not any("again" in row.name for row in rows(by_cpu))


def test_kernels_that_were_not_timed_in_the_step_are_not_called_host_time() -> None:
    report = applied()
    assert report.before is not None and report.after is not None and report.fusions
    kept = [row for row in report.fusions if row.status is Status.KEPT]
    untimed = tuple(replace(row, step_delta_ns=None, step_delta_ci_ns=None) for row in kept)
    training = replace(report, step_before=None, step_after=None, captured=None, fusions=untimed, rewrites=())
    (kernels,) = [row for row in rows(training) if row.name == "rewrites that were not timed in the step"]
    assert kernels.delta_ns == report.after.device_ns - report.before.device_ns < 0 and "traced" in kernels.note
    timed = tuple(replace(row, step_delta_ns=-1000) for row in untimed)
    for shown in (replace(training, fusions=timed), report):
        assert not any("not timed" in row.name for row in rows(shown))
