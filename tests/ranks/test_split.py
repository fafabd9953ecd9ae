"""A rank's step by what it did: the rank that comes last to a collective waits for nobody."""

from __future__ import annotations

from fusion_advisor.ranks.split import Told, between_ranks, rank_times, without_waiting
from fusion_advisor.records import Launch


def told(compute_ns, collectives_ns, span_ns=100):
    return Told(device="cpu", span_ns=span_ns, compute_ns=compute_ns, collectives_ns=collectives_ns)


def test_a_step_is_compute_communication_waiting_and_idle_time():
    first, second = rank_times([told(30, (10, 40)), told(55, (25, 5))])
    assert (first.compute_ns, first.communication_ns, first.waiting_ns, first.idle_ns) == (30, 15, 35, 20)
    assert (second.compute_ns, second.communication_ns, second.waiting_ns, second.idle_ns) == (55, 15, 15, 15)
    for row in (first, second):
        assert row.compute_ns + row.communication_ns + row.waiting_ns + row.idle_ns == 100


def test_without_collectives_nobody_waits():
    rows = rank_times([told(30, ()), told(90, ())])
    assert [(row.communication_ns, row.waiting_ns, row.idle_ns) for row in rows] == [(0, 0, 70), (0, 0, 10)]


def test_ranks_with_other_collectives_are_not_compared():
    rows = rank_times([told(30, (10,)), told(30, (10, 40))])
    assert [(row.communication_ns, row.waiting_ns) for row in rows] == [(10, 0), (50, 0)]


def launch(category, start_ns, duration_ns):
    return Launch(kernel_name=category, op_index=None, duration_ns=duration_ns, start_ns=start_ns, category=category)


def test_waiting_counts_in_no_share_of_the_step():
    step = (launch("collective", 50, 40), launch("gemm", 0, 30), launch("collective", 30, 10))
    assert [one.start_ns for one in between_ranks(step)] == [30, 50]
    assert [one.duration_ns for one in without_waiting(step, [(10, 40), (25, 5)])] == [5, 30, 10]
    assert without_waiting(step, [(10, 40), (25,)]) == step
