"""What a step's noise hides is judged by the chain's own times, and only that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_advisor.fuse.decide.alone import judged_alone, savings_alone
from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.records import Status
from fusion_advisor.timing.interleaving import Difference
from fusion_advisor.timing.wall_timer import as_timing
from tests.fuse.decide.test_keep_rule import clock, decided  # noqa: F401
from tests.report.fixtures import applied

GAIN = Difference(median_ns=-20_000, low_ns=-22_000, high_ns=-18_000)


def verdict(status, low_ns=-90_000, high_ns=80_000):
    return Verdict(id="F1", status=status, reason="±", delta_ns=-5_000, interval_ns=(low_ns, high_ns))


def judged(found, alone=GAIN):
    return judged_alone(found, alone, step_ns=1_000_000, min_gain=0.005)


def test_a_gain_that_the_chain_shows_is_kept():
    found = judged(verdict(Status.WITHIN_NOISE))
    assert (found.status, found.delta_ns, found.interval_ns) == (Status.KEPT, -20_000, (-22_000, -18_000))
    assert "chain's own times" in found.reason


@pytest.mark.parametrize(
    ("found", "alone"),
    [
        (verdict(Status.SLOWER), GAIN),
        (verdict(Status.WITHIN_NOISE, low_ns=1_000), GAIN),  # the step did not become faster in any case
        (verdict(Status.WITHIN_NOISE), None),
        (verdict(Status.WITHIN_NOISE), Difference(median_ns=-9_000, low_ns=-20_000, high_ns=-4_000)),  # below the least gain
        (verdict(Status.KEPT), GAIN),
    ],
)
def test_any_other_verdict_stays(found, alone):
    assert judged(found, alone) is found


def test_a_chain_counts_once_for_each_of_its_runs():
    fusion = replace(
        applied().fusions[0], chain_before=as_timing([100] * 9, "cpu_time"), chain_after=as_timing([40] * 9, "cpu_time")
    )
    (saving,) = savings_alone([fusion, replace(fusion, chain_after=None)], {fusion.chain_id: 12}, 0.95).values()
    assert saving == Difference(median_ns=-720, low_ns=-720, high_ns=-720)


def test_a_loud_step_keeps_what_its_chain_shows_and_nothing_else(clock):  # noqa: F811
    effects = {"gelu": -20_000, "idle": 0}
    for seed in range(10):
        found = decided(clock, effects, noise=0.2, seed=seed, alone={"gelu": GAIN}).verdicts
        assert (found["gelu"].status, found["idle"].status is Status.KEPT) == (Status.KEPT, False)
        without = decided(clock, effects, noise=0.2, seed=seed).verdicts
        assert without["gelu"].status is not Status.KEPT
