"""Intervals of predictions: each part of the uncertainty widens them, each kind of rewrite has its factor."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fusion_advisor.fuse.prediction.interval import CALIBRATION, Calibration, Kind, kind_of, spread_ns, with_intervals
from fusion_advisor.records import GraphRewrite, RewriteStage, Status
from tests.report.fixtures import applied, chain, profiled, timing

CHAIN = replace(chain(2, ("mul",), 10, 100_000, 0.1), launches=40)
FUSION = replace(
    applied().fusions[0], chain_id="C2", chain_before=timing(10_000), chain_after=timing(2_000), predicted_saving_ns=95_000
)


def spread(row=FUSION, of=CHAIN, *, launch_ns=1_000, cost_ns=500, call_ns=150_000):
    return spread_ns(row, of, launch_ns=launch_ns, cost_ns=cost_ns, call_ns=call_ns)


def graph_rewrite(stage, sites=4, saving_ns=0):
    return GraphRewrite(
        id="any", name="any", status=Status.KEPT, reason="", sites=sites, stage=stage, predicted_saving_ns=saving_ns
    )


def test_the_kind_says_how_a_saving_is_predicted():
    assert kind_of(FUSION) is Kind.CHAIN
    assert kind_of(replace(FUSION, chain_id="", kernel="linear_residual")) is Kind.LINEAR
    assert kind_of(replace(FUSION, chain_id="", kernel="rmsnorm_gate_up")) is Kind.NORM_LINEAR
    kinds = {stage: kind_of(graph_rewrite(stage)) for stage in RewriteStage}
    assert kinds == {RewriteStage.PASS: Kind.PASS, RewriteStage.ON_TOP: Kind.ALONE, RewriteStage.CALL: Kind.CUDA_GRAPH}


def test_each_part_of_a_chains_uncertainty_widens_it():
    cold = replace(FUSION, chain_before=timing(8_500))
    unsteady = replace(FUSION, chain_after=timing(2_000, spread=0.2))
    alone = spread(cost_ns=0, launch_ns=0)
    assert alone < spread(launch_ns=3_000, cost_ns=0) < spread(launch_ns=3_000, cost_ns=800)
    assert spread() < spread(cold) and spread() < spread(unsteady)
    assert spread() < spread(of=replace(CHAIN, device_ns=120_000))
    assert alone == pytest.approx(math.hypot(3_000, 20_000 * math.hypot(0.002, 0.002)), rel=1e-6)  # two steady timings, the trace


def test_a_trace_taken_beside_another_program_has_an_interval_that_reaches_what_the_ops_take_alone():
    alone = replace(timing(10_000), method="cpu_time")  # ten runs: 100 µs
    fusion = replace(FUSION, chain_before=alone, chain_after=replace(timing(2_000), method="cpu_time"))
    disturbed, quiet = replace(CHAIN, device_ns=750_000), CHAIN
    factor = CALIBRATION.factors[Kind.CHAIN]
    assert factor * spread(fusion, disturbed, cost_ns=0) > disturbed.device_ns - 100_000
    wall = replace(fusion, chain_before=timing(10_000))
    assert spread(fusion, quiet) == spread(wall, quiet) and spread(fusion, disturbed) > 2 * spread(wall, disturbed)


def test_other_kinds_widen_with_what_they_are_predicted_from():
    graph = graph_rewrite(RewriteStage.CALL, saving_ns=3_000_000)
    assert spread(graph, None) == pytest.approx(math.hypot(60_000, 60_000))
    assert spread(graph, None, call_ns=300_000) > spread(graph, None)
    on_top = graph_rewrite(RewriteStage.ON_TOP, sites=30)
    assert spread(on_top, None) == pytest.approx(10_000) and spread(replace(on_top, sites=60), None) == pytest.approx(20_000)
    linear = replace(FUSION, chain_id="", kernel="linear", predicted_saving_ns=0)
    assert spread(linear, None) == pytest.approx(linear.receipt.sites_found * 1_000 / 3)
    nothing = graph_rewrite(RewriteStage.PASS)
    assert spread(nothing, None) == pytest.approx(2_000)  # of 0 too: it may save a launch or two
    assert spread(replace(nothing, predicted_saving_ns=-1_000_000), None) > 50_000


def test_every_prediction_of_a_report_gets_an_interval_of_its_kinds_factor():
    report = applied()
    found = with_intervals(report)
    for row in (*found.fusions, *found.rewrites):
        if row.predicted_saving_ns is None or getattr(row, "chain_after", row) is None:
            assert row.predicted_low_ns is row.predicted_high_ns is None
        else:
            assert row.predicted_low_ns < row.predicted_saving_ns < row.predicted_high_ns
    twice = Calibration(factors={kind: 2 * factor for kind, factor in CALIBRATION.factors.items()}, graph_call_ns=1)
    for one, other in zip(found.fusions[:3], with_intervals(report, twice).fusions, strict=False):
        widths = [row.predicted_high_ns - row.predicted_low_ns for row in (other, one)]
        assert widths[0] == pytest.approx(2 * widths[1], abs=4)
    assert with_intervals(found) == found


def test_at_the_power_limit_a_memory_bound_saving_may_count_for_little_more_than_half():
    rewrites = tuple(graph_rewrite(stage, saving_ns=1_000_000) for stage in RewriteStage)
    free = replace(applied(), rewrites=rewrites, step_before=timing(5_000_000))
    held = replace(free, step_before=replace(timing(5_000_000), rest=2.0))
    widened = set()
    for one, other in zip(*map(rows_of, (free, held)), strict=True):
        assert one.predicted_high_ns == other.predicted_high_ns
        if one.predicted_low_ns != other.predicted_low_ns:
            widened.add(kind_of(one))
            assert other.predicted_low_ns == math.floor(0.55 * one.predicted_saving_ns) < one.predicted_low_ns
    assert widened == {Kind.CHAIN, Kind.PASS}


def rows_of(report):
    found = with_intervals(report)
    return (*found.fusions, *found.rewrites)


def test_what_has_no_prediction_stays_as_it_is():
    report = applied()
    foreign = replace(report.fusions[0], chain_id="C99", predicted_low_ns=None, predicted_high_ns=None)
    assert with_intervals(replace(report, fusions=(foreign,))).fusions == (foreign,)
    assert with_intervals(profiled()) == profiled()
    silent = replace(report.fusions[1], chain_id="", kernel="linear", predicted_saving_ns=0)
    said = replace(silent, predicted_saving_ns=1)
    found = with_intervals(replace(report, fusions=(silent, said))).fusions
    assert found[0] == silent and found[1].predicted_low_ns < 1 < found[1].predicted_high_ns


def test_every_kind_has_a_factor():
    assert set(CALIBRATION.factors) == set(Kind) and min(CALIBRATION.factors.values()) > 0
