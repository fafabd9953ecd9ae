"""Who waits for whom."""

from __future__ import annotations

import pytest

from fusion_advisor.fleet.skew import RankTimes, skewed


def rank(number, compute, collectives, *, job="j", span=1000, capture=1):
    return RankTimes(
        job=job,
        rank=number,
        number=capture,
        span_ns=span,
        compute_ns=compute,
        communication_ns=sum(collectives),
        collectives_ns=tuple(collectives),
    )


def test_the_shortest_collective_is_the_transfer_and_the_rest_is_waiting():
    rows = skewed([rank(0, 600, [150, 150]), rank(1, 800, [50, 50])])
    assert [(row.rank, row.transfer_share, row.waiting_share) for row in rows] == [
        (0, pytest.approx(0.1), pytest.approx(0.2)),
        (1, pytest.approx(0.1), pytest.approx(0.0)),
    ]


def test_the_shares_of_a_rank_sum_to_one():
    for row in skewed([rank(0, 600, [150, 150]), rank(1, 800, [50, 50]), rank(2, 100, [50, 60])]):
        assert row.compute_share + row.transfer_share + row.waiting_share + row.idle_share == pytest.approx(1)


@pytest.mark.parametrize("others", [[], [rank(1, 100, [10])]])
def test_without_the_same_collectives_nothing_is_called_waiting(others):
    assert all(row.waiting_share == 0 for row in skewed([rank(0, 600, [150, 150]), *others]))


def test_traces_of_one_rank_count_together_and_pair_by_number():
    rows = skewed([rank(0, 600, [100]), rank(0, 600, [50], capture=2), rank(1, 600, [50]), rank(1, 600, [100], capture=2)])
    assert [(row.rank, row.traces, row.span_ns) for row in rows] == [(0, 2, 2000), (1, 2, 2000)]
    assert [row.waiting_share for row in rows] == [pytest.approx(0.025), pytest.approx(0.025)]


def test_the_most_unequal_job_comes_first():
    rows = skewed(
        [rank(0, 1, [10], job="even"), rank(1, 1, [10], job="even"), rank(0, 1, [10], job="odd"), rank(1, 1, [90], job="odd")]
    )
    assert [row.job for row in rows] == ["odd", "odd", "even", "even"]
