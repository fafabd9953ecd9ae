"""The whole model's check on several ranks: a copy in a wider dtype runs its collectives with all of them, or with none."""

from __future__ import annotations

import torch

from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.fuse.live.model_check import check_whole_model
from fusion_advisor.workload.load import describe_live


def oracle_of(**more):
    """What a tiny model is compared with."""
    model, x = torch.nn.Linear(4, 4).eval(), torch.ones(2, 4)
    with torch.no_grad():
        check = check_whole_model(describe_live(model, (x,)), lambda: model(x), lambda: model(x), Written(), **more)
    assert check.is_passed
    return check.oracle


def test_a_copy_is_compared_with_unless_a_rank_has_none():
    asked = []
    assert oracle_of(worst=lambda own: asked.append(own) or own) == "float64 copy"
    assert oracle_of(worst=lambda own: asked.append(own) or "rank 1: no copy") == "eager"
    assert asked == ["", ""]


def test_the_least_memory_of_all_ranks_decides():
    assert oracle_of(memory_bytes=lambda _: (100, 10**9)) == "eager"
    assert oracle_of(memory_bytes=lambda _: (10**9, 10**9)) == "float64 copy"
