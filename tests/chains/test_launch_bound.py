"""Busy time is a union, idle time is the rest of the wall clock, and every floor is one that no run can beat."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_advisor import units
from fusion_advisor.chains.launch_bound import IDLE_LIMIT_SHARE, busy_ns, judge_launches
from fusion_advisor.records import Launch, Match, Timing
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.report import shared_rows
from tests.report import fixtures
from tests.tiny import planned, profiled


def launch(start, duration, stream=0):
    return Launch(kernel_name="k", op_index=None, start_ns=start, duration_ns=duration, stream=stream)


def timing(ns):
    return Timing(times_ns=(ns,), median_ns=ns, ci_low_ns=ns, ci_high_ns=ns, method="wall")


def test_overlapping_kernels_count_once():
    assert busy_ns([]) == 0
    assert busy_ns([launch(10, 5), launch(0, 4)]) == 9
    assert busy_ns([launch(0, 10), launch(2, 3, 1), launch(8, 6, 1), launch(20, 1)]) == 15


def judged(wall_ns, launches=100, each_ns=1000):
    _, capture, _ = profiled("toy")
    plan = planned("toy")
    gpu = replace(capture.environment, device_kind="cuda")
    eager = tuple(launch(number * each_ns, each_ns) for number in range(launches))
    capture = replace(capture, environment=gpu, eager_launches=eager, eager_step=timing(wall_ns))
    return judge_launches(capture, plan.chains, plan.answers), plan


def test_a_step_that_waits_for_its_launches():
    found, plan = judged(200_000)
    assert found.is_launch_bound and found.idle_ns == 100_000 and found.launches == 100
    gone = sum(
        chain.launches - len(chain.sites)
        for chain, answer in zip(plan.chains, plan.answers, strict=True)
        if isinstance(answer, Match)
    )
    assert found.launches_fused == 100 - gone < 100
    assert found.graph_floor_ns == 100_000
    assert found.fusion_floor_ns == max(found.both_floor_ns, 2000 * found.launches_fused)
    assert found.both_floor_ns <= found.graph_floor_ns


@pytest.mark.parametrize("wall_ns", [90_000, 100_000, round(100_000 / (1 - IDLE_LIMIT_SHARE)) - 1])
def test_a_busy_device_is_not_launch_bound(wall_ns):
    found, _ = judged(wall_ns)
    assert not found.is_launch_bound and found.idle_ns == max(0, wall_ns - 100_000)
    assert found.fusion_floor_ns == found.both_floor_ns


def test_a_cpu_is_not_judged():
    _, capture, _ = profiled("toy")
    assert judge_launches(capture, (), ()) is None


def test_the_report_says_it_in_a_sentence():
    report = fixtures.profiled()
    assert shared_rows.launch_line(replace(report, launch_verdict=None)) == ""
    report = replace(report, before=replace(report.before, wall=None))  # the verdict's own wall time is named where no other is
    bound = replace(report, launch_verdict=judged(200_000)[0])
    line = shared_rows.launch_line(bound)
    assert "will not help" not in line and "GPU waiting for Python" in line and "idle 50.0%" in line
    assert all(f"{name} {units.duration(ns)}" in line for name, ns in lower_bounds(bound))
    assert load_report(dump_report(bound)) == bound
    assert "busy for most of the eager step" in shared_rows.launch_line(replace(report, launch_verdict=judged(100_000)[0]))


def lower_bounds(report):
    found = report.launch_verdict
    return (("CUDA graph", found.graph_floor_ns), ("fusion", found.fusion_floor_ns), ("both", found.both_floor_ns))
