"""The traced time of launches, where they overlap and where the trace does not say when they start."""

from __future__ import annotations

import pytest

from fusion_advisor.fuse.rewrite.price import busy_ns
from fusion_advisor.records import Launch


@pytest.mark.parametrize(
    ("spans", "expected_ns"),
    [
        ([], 0),
        ([(0, 5)], 5),
        ([(0, 5), (5, 5), (20, 1)], 11),
        ([(0, 10), (2, 3), (8, 4)], 12),  # one within another, one past its end
        ([(-9, 4), (-7, 4), (30, 2)], 8),
        ([(0, 5), (0, 7)], 12),  # no trace starts two kernels at one nanosecond: it has no starts
    ],
)
def test_time_in_which_several_run_counts_once(spans, expected_ns):
    launches = [Launch(kernel_name="k", op_index=0, duration_ns=took, start_ns=start) for start, took in reversed(spans)]
    assert busy_ns(launches) == expected_ns
