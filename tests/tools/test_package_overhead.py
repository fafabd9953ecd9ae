"""The Python around a package's graph is measured on both sides, and calls that are not replayed are no figures."""

from __future__ import annotations

import pytest

from tools.package_overhead import OfPackage, around, measure


def test_a_row_has_both_sides_of_both_ways():
    name, *figures = measure("gpt2", 5, layers=1).strip("| ").split(" | ")
    assert name == "gpt2, 1 layers" and len(figures) == 4
    assert all(float(one) > 0 for one in figures)


def test_calls_that_are_not_replayed_are_refused():
    recorder = OfPackage()
    with pytest.raises(RuntimeError, match="only 0 of 5"):
        around(lambda: None, recorder, lambda: None, 5)
    ahead, behind = around(recorder.replay, recorder, lambda: None, 5)
    assert ahead > 0 and behind > 0 and recorder.replays == 17
