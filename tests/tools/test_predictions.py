"""Predicted against measured savings of the committed runs: coverage by runs that did not give the factors, and the tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fusion_advisor.fuse.prediction.interval import CALIBRATION, Kind
from fusion_advisor.records import Fusion, GraphRewrite, RewriteStage
from fusion_advisor.records.serialize import write_report
from tests.report.fixtures import applied
from tools.predictions import forms, table
from tools.predictions.__main__ import main
from tools.predictions.calibrate import COVERED, calibrate, factor_of, left_out
from tools.predictions.observations import PRECISE, TOGETHER, Observation, observe, observe_all, read_runs

ROOT = Path(__file__).resolve().parents[2]
ONE = Observation(
    run="a", id="F1", name="gelu", kind=Kind.CHAIN, status="kept", predicted_ns=110_000, low_ns=95_000, high_ns=125_000,
    spread_ns=5_000, measured_ns=100_000, measured_low_ns=98_000, measured_high_ns=103_000,
)  # fmt: skip


@pytest.fixture(scope="module")
def runs():
    found, refused = read_runs([ROOT / "reports" / "examples"])
    assert len(found) >= 14 and not refused
    return found


@pytest.fixture(scope="module")
def judged(runs):
    return left_out(runs)


def test_intervals_cover_nine_of_ten_savings_of_runs_that_did_not_give_their_factors(judged):
    precise = [one for one in judged if one.is_precise]
    assert len(precise) >= 80
    assert 0.85 <= sum(one.is_covered for one in precise) / len(precise) <= 0.95


def test_the_factors_are_what_the_committed_runs_give(runs):
    assert calibrate(runs) == CALIBRATION, "python -m tools.predictions reports/examples --calibrate"


def test_errors_are_as_small_as_they_are_said_to_be(judged):
    errors = [abs(one.error_share) for one in judged if one.is_precise]
    assert table.percentile(errors, 0.5) <= 0.10 and table.percentile(errors, 0.9) <= 0.25


def test_a_wider_factor_covers_more_and_a_narrower_one_less(runs):
    def covered(factor):
        rule = replace(CALIBRATION, factors={kind: factor * own for kind, own in CALIBRATION.factors.items()})
        return sum(one.is_covered for one in observe_all(runs, rule) if one.is_precise)

    assert covered(0.3) < covered(1.0) < covered(4.0)


def test_the_committed_table_is_what_the_tool_writes(runs, judged, tmp_path):
    folder = ROOT / "docs" / "measurements"
    table.write(tmp_path, judged, calibrate(runs))
    for name in ("predictions.json", "predictions.svg"):
        assert (folder / name).read_text() == (tmp_path / name).read_text(), name
    page = (folder / "predictions.md").read_text()
    assert (tmp_path / "predictions.md").read_text().strip() in page
    assert forms.markdown(runs).strip() in page


def test_the_rank_of_a_factor_is_that_of_nine_in_ten():
    ones = [replace(ONE, predicted_ns=100_000 + 1_000 * at, spread_ns=1_000) for at in range(1, 20)]
    assert factor_of(ones) == 18  # ⌈0.9 × 20⌉
    assert factor_of(ones[:4]) == 4  # the largest where no rank is high enough
    assert COVERED == 0.9


def test_a_measurement_judges_a_prediction_where_its_interval_is_narrow():
    assert ONE.is_precise and ONE.error_share == pytest.approx(0.1) and ONE.is_covered and ONE.is_met and ONE.is_sign_right
    wide = replace(ONE, measured_low_ns=80_000, measured_high_ns=120_000)
    assert not wide.is_precise and wide.noise_ns > PRECISE * 110_000
    small = replace(ONE, measured_ns=2_000, measured_low_ns=-3_000, measured_high_ns=7_000)
    assert small.is_precise and not small.is_covered and not small.has_sign  # a large saving was predicted, and there is none
    assert not replace(small, measured_ns=0).is_precise
    slower = replace(ONE, measured_ns=-5_000, measured_low_ns=-9_000, measured_high_ns=-1_000)
    assert slower.has_sign and not slower.is_sign_right and not slower.is_met
    assert not replace(ONE, predicted_ns=0).is_sign_right


def test_rewrites_that_were_timed_together_are_one_observation_and_those_timed_alone_are_none():
    report = applied()
    one, two = report.fusions[:2]
    both = (replace(one, timed_with=("F2",)), replace(two, timed_with=("F1",)))
    found = observe("a", replace(report, fusions=both, rewrites=()), CALIBRATION)
    assert [(row.id, row.group, row.kind) for row in found] == [("F1, F2", TOGETHER, None)]
    assert found[0].measured_ns == 1_480_000 + 1_390_000 and found[0].predicted_ns == sum(
        row.predicted_ns for row in observe("a", replace(report, fusions=(one, two), rewrites=()), CALIBRATION)
    )
    assert found[0].measured_low_ns == 1_440_000 + 1_330_000 and found[0].measured_high_ns == 1_530_000 + 1_450_000
    alone = replace(one, is_timed_alone=True)
    assert [row.id for row in observe("a", replace(report, fusions=(alone, two), rewrites=()))] == ["F2"]
    missing = (replace(one, timed_with=("F9",)), two)  # a part that nobody predicted: the sum cannot be judged
    assert [row.id for row in observe("a", replace(report, fusions=missing, rewrites=()))] == ["F2"]


def test_the_intervals_that_a_report_holds_are_judged_where_they_are_asked_for():
    report = applied()
    (found,) = (row for row in observe("a", report) if row.id == "F1")
    assert (found.predicted_ns, found.low_ns, found.high_ns) == (1_560_000, 1_430_000, 1_690_000)
    (again,) = (row for row in observe("a", report, CALIBRATION) if row.id == "F1")
    assert again.predicted_ns == 1_560_000 and again.high_ns - again.low_ns != 260_000


@pytest.mark.parametrize(("low_ns", "expected_ns"), [(None, 4_900_000), (1, 5_058_000)])
def test_an_older_reports_graph_was_predicted_without_the_cost_of_its_call(low_ns, expected_ns):
    high_ns = None if low_ns is None else 9_000_000
    row = GraphRewrite(
        id="cuda-graph", name="CUDA graph", status=applied().fusions[0].status, reason="", sites=1, step_delta_ns=-4_800_000,
        step_delta_ci_ns=(-4_900_000, -4_700_000), predicted_saving_ns=5_000_000, predicted_low_ns=low_ns,
        predicted_high_ns=high_ns, stage=RewriteStage.CALL,
    )  # fmt: skip
    calibration = replace(CALIBRATION, graph_call_ns=100_000)
    (found,) = observe("a", replace(applied(), fusions=(), rewrites=(row,)), calibration)
    assert found.predicted_ns == expected_ns == 5_000_000 + (CALIBRATION.graph_call_ns if low_ns else 0) - 100_000


def test_tables_count_what_they_show(judged):
    shown = table.markdown(judged, CALIBRATION)
    rows = [line.split("|") for line in shown.split("\n\n")[1].splitlines()[2:]]
    counts = {row[1].strip(): int(row[2]) for row in rows}
    assert counts.pop("all") == sum(counts.values()) == len(judged)
    covered = sum(one.is_covered for one in judged if one.is_precise)
    assert f"and {covered} (" in table.summary(judged)
    assert "none was measured narrowly enough" in table.markdown([replace(ONE, measured_ns=0)])
    for one in (ONE, replace(ONE, kind=None), replace(ONE, predicted_ns=-5)):
        assert len(ElementTree.fromstring(table.picture([one])).findall(".//{*}title")) == 1


def test_the_command_reads_any_folder_and_goes_on_after_a_file_that_is_no_report(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    for name in ("one", "two"):
        (tmp_path / "zoo" / name).mkdir(parents=True)
        write_report(applied(), tmp_path / "zoo" / name / "report.json")
    (tmp_path / "zoo" / "broken").mkdir()
    (tmp_path / "zoo" / "broken" / "report.json").write_text("{")
    capsys.readouterr()
    assert main([str(tmp_path / "zoo"), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    assert "broken" in shown.err and "savings of 2 runs" in shown.out
    rows = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert {row["run"] for row in rows} == {"one", "two"}
    assert main([str(tmp_path / "zoo"), "--calibrate"]) == 0 and "Kind.CHAIN: " in capsys.readouterr().out
    assert main([str(tmp_path / "zoo"), "--forms"]) == 0 and "chosen anew" in capsys.readouterr().out


def test_a_form_is_chosen_by_the_other_runs(runs):
    found = forms.figures(runs, PRECISE)
    assert {one.run for one in found} <= set(runs) and len(found) > 30
    assert len(forms.chosen_by_others(found)) == len(found)
    chosen = next(form for name, form in forms.FORMS.items() if "chosen" in name)
    report = runs["gpt2-fp32-1x128-h200"]
    (one,) = (one for one in forms.figures({"a": report}, PRECISE) if one.measured == 57_371)
    (row,) = (row for row in observe("a", report) if row.measured_ns == 57_371)
    assert chosen(one) == pytest.approx(row.predicted_ns, abs=1)
    assert all(isinstance(fusion, Fusion) for fusion in report.fusions)
