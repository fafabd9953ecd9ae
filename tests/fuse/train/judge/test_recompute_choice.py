"""What a recompute option may cost: nothing, unless the step needs the memory or the option spares much of it."""

from __future__ import annotations

import pytest

from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.train.judge.recompute_choice import RecomputeChoice, StepPeaks

PEAKS = {"below eager's": (2000, 1000), "above eager's": (900, 1000), "not measured": (0, 0)}


@pytest.mark.parametrize(
    ("peaks", "saved_bytes", "share"),
    [
        ("below eager's", 49, 0.0), ("below eager's", 50, 0.02), ("above eager's", 1, 0.02), ("not measured", 50, 0.0),
    ],
    ids=["a little of the peak", "much of the peak", "a peak above eager's", "no peak"],
)  # fmt: skip
def test_an_option_may_cost_time_where_its_memory_is_worth_it(peaks, saved_bytes, share):
    eager_bytes, ours_bytes = PEAKS[peaks]
    choice = RecomputeChoice(
        options=ApplyOptions(),
        peaks=StepPeaks(eager_bytes=eager_bytes, ours_bytes=ours_bytes),
        each_s=1.0,
        end_s=None,
        clock=float,
    )
    assert choice.most_share(saved_bytes) == share
