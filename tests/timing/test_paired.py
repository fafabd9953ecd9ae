"""The one statistic of before and after: paired, of the level that was asked for, and the same for ratio and difference."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from fusion_advisor.timing.interleaving import difference
from fusion_advisor.timing.paired import compare_rounds


def rounds(seed, count, *, gain=1.0, drift=0.0, noise=100.0):
    """Times of a step of 10 µs before and after; ``drift`` moves whole rounds."""
    draw = np.random.default_rng(seed)
    moved = draw.normal(0, drift, count) if drift else np.zeros(count)
    before = 10_000 + moved + draw.exponential(noise, count)
    after = (10_000 + moved + draw.exponential(noise, count)) / gain
    return [round(value) for value in before], [round(value) for value in after]


@pytest.mark.parametrize("count", [6, 7, 20, 51])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_a_step_that_did_not_change_is_inside_as_often_as_the_level_says(count, confidence):
    inside = 0
    for seed in range(300):
        found = compare_rounds(*rounds(seed, count, drift=300), confidence)
        assert (found.low_ns >= 0) == (round(found.ratio_high, 4) <= 1) or abs(found.low_ns) <= 1
        inside += found.ratio_low <= 1 <= found.ratio_high
    assert confidence - 0.06 <= inside / 300


def test_the_interval_is_as_wide_as_the_level_asks():
    before, after = rounds(0, 40)
    widths = [
        found.ratio_high - found.ratio_low
        for found in (compare_rounds(before, after, level) for level in (0.51, 0.8, 0.9, 0.95, 0.999))
    ]
    assert widths == sorted(set(widths))


def test_drift_of_whole_rounds_hides_no_gain():
    """Each side's own times spread by 30 %, and the gain is 2 %."""
    before, after = rounds(3, 60, gain=1.02, drift=1_000, noise=10)
    found = compare_rounds(before, after)
    assert found.ratio_low > 1.01
    assert max(before) > 1.3 * min(before)


def test_sides_that_were_not_timed_in_turns_are_resampled_apart():
    before, _ = rounds(1, 30)
    after, _ = rounds(2, 17)
    found = compare_rounds(before, [value // 2 for value in after])
    assert 1.9 < found.ratio_low < found.ratio < found.ratio_high < 2.1


def test_few_rounds_give_their_whole_range():
    found = compare_rounds([100, 110, 120], [50, 44, 60])
    assert (found.ratio_low, found.ratio, found.ratio_high) == (2.0, 2.2, 2.5)
    assert (found.low_ns, found.delta_ns, found.high_ns) == (-66, -60, -55)


def test_the_keep_rule_and_the_headline_read_one_statistic():
    before, after = rounds(5, 25, gain=1.03)
    found, kept_by = compare_rounds(before, after), difference(before, after)
    assert (kept_by.median_ns, kept_by.low_ns, kept_by.high_ns) == (found.delta_ns, found.low_ns, found.high_ns)


def test_a_report_is_rendered_without_torch():
    code = "import sys, fusion_advisor.timing.paired as p; p.compare_rounds([1] * 9, [2] * 9); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
