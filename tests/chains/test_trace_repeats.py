"""Repeats on names alone."""

from __future__ import annotations

import random

import pytest

from fusion_advisor.chains import trace_repeats
from fusion_advisor.chains.trace_repeats import find_repeats


def found(*runs, **options):
    result = find_repeats([run.split() for run in runs], [[10] * len(run.split()) for run in runs], **options)
    return {" ".join(map(str, one.items)): one.places for one in result.found}


def test_the_longest_common_part_of_runs_is_one_chain():
    assert found("a n1 n2 n3", "a n1 n2 n3", "e n1 n2 n3", "a n1 n2 n3") == {"a n1 n2 n3": ((0, 0), (1, 0), (3, 0))}


def test_what_is_left_of_a_run_is_searched_again():
    assert found("a b c x", "a b c y", "q r a b c", "q r", "q r") == {
        "a b c": ((0, 0), (1, 0), (2, 2)),
        "q r": ((2, 0), (3, 0), (4, 0)),
    }


def test_a_repeat_of_itself_counts_as_its_period():
    assert found("m n c m a m n c m a", "m n c m a m n c m a") == {"m n c m a": ((0, 0), (0, 5), (1, 0), (1, 5))}


def test_a_long_periodic_run_is_its_period_at_every_place():
    ((items, places),) = found(" ".join(["m g a s"] * 100)).items()
    assert sorted(items.split()) == ["a", "g", "m", "s"]
    assert len(places) >= 99


def test_what_does_not_repeat_or_is_single_is_no_chain():
    assert found("a b c", "d e f") == {}
    assert found("a", "a", "a") == {}
    assert found() == {}


def test_places_of_one_run_do_not_overlap():
    ((_, places),) = found("a b a b a").items()
    assert places == ((0, 0), (0, 2))


def test_dear_sequences_come_first_and_cheap_ones_are_left():
    runs = [["a", "b"], ["c", "d"]] * 3
    result = find_repeats(runs, [[1, 1], [50, 50]] * 3)
    assert [one.items for one in result.found] == [("c", "d"), ("a", "b")]
    assert [one.items for one in find_repeats(runs, [[1, 1], [50, 50]] * 3, least_cost=7).found] == [("c", "d")]


def test_planted_chains_are_found_among_noise():
    """Every planted site is in a chain that holds all of its items, and nothing is counted twice."""
    rng = random.Random(3)
    chain = [f"k{number}" for number in range(9)]
    runs = []
    for number in range(60):
        noise = [f"n{rng.randrange(1000)}" for _ in range(rng.randrange(4))]
        runs.append(noise + chain + [f"t{number}"])
    result = find_repeats(runs, [[5] * len(run) for run in runs])
    assert result.found[0].items == tuple(chain)
    assert len(result.found[0].places) == 60
    taken = [(run, start + at) for one in result.found for run, start in one.places for at in range(len(one.items))]
    assert len(taken) == len(set(taken))


def test_what_is_found_is_counted_beyond_the_items_that_can_be_searched(monkeypatch):
    monkeypatch.setattr(trace_repeats, "_MOST_ITEMS", 10)
    periodic = [["m", "g", "s"] * 100]
    result = find_repeats(periodic, [[1] * 300], least_cost=90)
    # the period across the cut is lost
    assert [(one.items, len(one.places)) for one in result.found] == [(("m", "g", "s"), 99)]
    assert result.searched_share == pytest.approx(10 / 300)
    runs = [["a", "b"]] * 4 + [[f"x{number}" for number in range(30)] + ["a", "b"]]
    result = find_repeats(runs, [[100, 100]] * 4 + [[1] * 32])
    assert [(one.items, len(one.places)) for one in result.found] == [(("a", "b"), 5)]
    assert result.searched_share == pytest.approx(808 / 832)
