from __future__ import annotations

from dataclasses import replace

from fusion_advisor.records import StepProfile, Timeline
from fusion_advisor.report.html.launch_gaps import EDGES_NS, bin_names, gap_rows, histogram
from tests.report.fixtures import applied, on_cpu

TIMELINE = Timeline(
    kernel=(0, 0, 0, 0),
    start_ns=(0, 3_000, 4_500, 30_000),
    duration_ns=(1_000, 2_000, 500, 1_000),
    call_start_ns=(-9_000, 500, 2_000, 6_000),
    call_ns=(2_000, 2_000, 1_000, 900),
)
"""The second kernel comes 2,000 ns and the fourth 25,000 ns after the device fell idle; the third at once."""


def rows_of(timeline: Timeline):
    kernels = (("k", "gemm", 4, 4_500),)
    step = StepProfile(label="eager", device_ns=4_500, launches=4, categories=(), kernels=kernels, timeline=timeline)
    return gap_rows(replace(applied(), before=step, captured=None, after=None))


def test_gaps_are_split_by_who_was_waited_for() -> None:
    (row,) = rows_of(TIMELINE)
    assert row.gaps == 2
    assert row.idle_ns == 27_000
    # both next kernels were launched after the device had fallen idle (at 1,000 and at 5,000)
    assert row.host_ns == 27_000
    assert row.queued_ns == 0
    (queued,) = rows_of(replace(TIMELINE, call_start_ns=(-9_000, 500, 2_000, 3_000)))
    assert queued.host_ns == 2_000
    assert queued.queued_ns == 25_000
    assert row.short_share == 0.5  # 1,000 < 2,000; 2,000 is not below 2,000; 500 < 1,000; 1,000 > 900
    assert row.median_kernel_ns == 1_000


def test_each_gap_lies_in_one_bin() -> None:
    (row,) = rows_of(TIMELINE)
    assert len(row.counts) == len(EDGES_NS) + 1 == len(bin_names())
    counted = {name: count for name, count in zip(bin_names(), row.counts, strict=True) if count}
    assert counted == {"2–5 µs": 1, "20–50 µs": 1}
    drawn = histogram((row,))
    assert drawn is not None
    assert sum(column.height > 0 for column in drawn.columns) == 2


def test_without_calls_nothing_is_claimed() -> None:
    (row,) = rows_of(replace(TIMELINE, call_start_ns=(), call_ns=()))
    assert (row.host_ns, row.queued_ns, row.short_share) == (None, None, None)
    assert row.idle_ns == 27_000


def test_a_cpu_and_a_single_kernel_have_no_gaps() -> None:
    assert gap_rows(on_cpu()) == ()
    (row,) = rows_of(Timeline(kernel=(0,), start_ns=(0,), duration_ns=(10,)))
    assert row.gaps == row.idle_ns == 0
    assert histogram((row,)) is None
