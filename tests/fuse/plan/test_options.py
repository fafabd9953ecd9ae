"""Options that contradict each other or mean nothing are refused before anything is measured."""

from __future__ import annotations

import pytest

from fusion_advisor.errors import UsageError
from fusion_advisor.fuse.plan.options import ApplyOptions


@pytest.mark.parametrize("level", [0.5, 1.0, 0.0, 95.0, -1.0])
def test_a_confidence_that_is_no_level_is_refused(level):
    with pytest.raises(UsageError, match="--confidence"):
        ApplyOptions(confidence=level)


@pytest.mark.parametrize("level", [0.51, 0.8, 0.999, 0.9999])
def test_any_level_between_half_and_one_is_taken(level):
    assert ApplyOptions(confidence=level).confidence == level


@pytest.mark.parametrize("name", ["graphs", "graph_bytes"])
def test_a_bound_that_keeps_no_cuda_graph_is_refused(name):
    assert getattr(ApplyOptions(**{name: 1}), name) == 1
    with pytest.raises(UsageError, match=f"{name}=0 keeps no CUDA graph"):
        ApplyOptions(**{name: 0})
