"""Graphs that are timed at a point leave the caller's cache as it was, whatever ran last."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.fuse.decide.instruments import MEASURED
from fusion_advisor.fuse.plan.size_ranges import read_shapes
from fusion_advisor.fuse.points.decide import RangeWork
from fusion_advisor.fuse.points.time_graphs import time_graphs
from fusion_advisor.fuse.points.time_limit import TimeLimit
from fusion_advisor.fuse.shapes.ranged_calls import ranged_calls
from fusion_advisor.runtime.torch_internals import module_call
from fusion_advisor.verify.known.passed_checks import PassedChecks
from fusion_advisor.workload.load import describe_live
from tests import tiny
from tests.fuse.points.test_piece_points import BANDWIDTH, Noting, options_for

SHAPES = "batch=2..8,seq=2..16,cached=2..30"
LEAST = {"batch": 2, "room": 2}
"""One token is in the cache, and there is room for the step's own: a second step would write past the end."""


@pytest.fixture(scope="module")
def step():
    """The work on a decode step with a static cache, its graph, and what the graph is called with in the least room."""
    model, kwargs = tiny.qwen2()
    loaded = describe_live(model, (), kwargs)
    ranged = next(call for call in ranged_calls(loaded, read_shapes(SHAPES)) if call.name == "static decode")
    work = RangeWork(
        loaded=loaded, options=options_for(SHAPES, keep="paying"), ranged=ranged, bandwidth=BANDWIDTH, progress=Noting(),
        limit=TimeLimit(), instruments=MEASURED, original=module_call.original_call(model), passed=PassedChecks(),
    )  # fmt: skip
    with torch.no_grad():
        opened = ranged.finder(work.capture).next().opened
    return work, opened, *work.graph_call(opened, LEAST)


def counts_in(given):
    """How many tokens each layer's cache holds: tensors that a step moves on."""
    return [one for one in given if isinstance(one, torch.Tensor) and one.dim() == 0 and not one.is_floating_point()]


def test_a_timed_step_leaves_the_cache_as_it_was(step):
    work, opened, given, written = step
    way = opened.region.graph.forward
    assert work.ranged.may_pad  # so that graphs are timed, not calls
    assert len(time_graphs(work, opened, [way, way], given, written, budget_s=0.01)) == 2
    assert [int(count) for count in counts_in(given)] == [1, 1]
    with torch.no_grad():
        way(*given)  # a cache that had moved on has no room for it
    written.rewind()


def test_so_does_one_whose_timing_fails(step):
    work, opened, given, written = step
    assert [int(count) for count in counts_in(given)] == [1, 1]

    def fails(*given):
        opened.region.graph(*given)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        time_graphs(work, opened, [fails], given, written, budget_s=0.01)
    assert [int(count) for count in counts_in(given)] == [1, 1]
