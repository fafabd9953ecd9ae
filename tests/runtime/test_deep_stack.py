"""The stack of frames: called with room, no depth is one at which every call maps memory anew."""

from __future__ import annotations

import sys

import pytest

from fusion_advisor.runtime.deep_stack import in_one_piece

CALLS = 300


def test_it_returns_what_the_function_returns_and_raises_what_it_raises():
    assert in_one_piece(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        in_one_piece(lambda: 1 // 0)
    assert in_one_piece(lambda: in_one_piece(lambda: "nested")) == "nested"


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted as Linux counts them")
def test_at_no_depth_does_each_call_map_memory():
    assert max(in_one_piece(lambda: [faults_at(depth) for depth in range(0, 400, 2)])) < CALLS // 2


def faults_at(depth):
    """Page faults of calls that are made from so many frames deep."""
    import resource

    if depth:
        return faults_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        leaf(1, 2, 3)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def leaf(*values):
    return sum(value for value in values)
