"""Each rank's time by what it did: a rank waits at a collective's begin, and what compute hides costs nothing."""

from __future__ import annotations

from fusion_advisor.capture.trace.kernels import Work
from fusion_advisor.capture.trace.rank_split import split_ranks


def work(*rows):
    """Work of (category, start, end) rows; a collective's name is its category's."""
    return [
        Work(f"{category}_kernel", category, category, number, False, start, end - start, end - start, (0, 0), -1, None)
        for number, (category, start, end) in enumerate(sorted(rows, key=lambda row: row[1]))
    ]


def of(split):
    return split.compute_ns, split.communication_ns, split.waiting_ns, split.idle_ns, split.hidden_ns


def test_the_rank_that_comes_last_waits_for_nobody():
    first = work(("gemm", 0, 30), ("collective", 30, 80), ("gemm", 80, 100))
    second = work(("gemm", 1000, 1060), ("collective", 1060, 1080), ("gemm", 1085, 1100))
    splits, are_alike = split_ranks([(first, 100), (second, 100)])
    assert are_alike
    assert [of(one) for one in splits] == [(50, 20, 30, 0, 0), (75, 20, 0, 5, 0)]
    for one in splits:
        assert one.compute_ns + one.communication_ns + one.waiting_ns + one.idle_ns == 100


def test_what_runs_beside_compute_is_hidden():
    """The first rank waits 40 of which compute covers 10, and communicates 20 of which compute covers 5."""
    first = work(("gemm", 0, 30), ("collective", 20, 80), ("pointwise", 75, 100))
    second = work(("gemm", 0, 60), ("collective", 60, 80), ("pointwise", 80, 100))
    (split, other), _ = split_ranks([(first, 100), (second, 100)])
    assert of(split) == (55, 15, 30, 0, 15)
    assert of(other) == (80, 20, 0, 0, 0)


def test_compute_in_the_middle_cuts_a_wait():
    first = work(("collective", 0, 100), ("gemm", 10, 20), ("gemm", 30, 40), ("gemm", 95, 110))
    second = work(("gemm", 0, 90), ("collective", 90, 100))
    (split, _), _ = split_ranks([(first, 110), (second, 110)])
    assert of(split) == (35, 5, 70, 0, 25)


def test_ranks_that_differ_are_not_compared():
    for other in (work(("gemm", 0, 90)), work(("collective", 0, 10), ("collective", 20, 30))):
        splits, are_alike = split_ranks([(work(("collective", 0, 60)), 60), (other, 90)])
        assert not are_alike
        assert splits[0].communication_ns == 60 and all(one.waiting_ns == 0 for one in splits)
