"""The whole model's check on several ranks: a copy in a wider dtype runs its collectives with all of them, or with none."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.fuse.live.model_check import check_whole_model
from fusion_advisor.workload.load import describe_live


class Narrow(torch.nn.Linear):
    """A model that stops in another dtype."""

    def __init__(self, error):
        super().__init__(4, 4)
        self.error = error

    def forward(self, x):
        if x.dtype == torch.float64:
            raise self.error
        return super().forward(x)


def oracle_of(model=None, **more):
    """What a tiny model is compared with."""
    model, x = (model or torch.nn.Linear(4, 4)).eval(), torch.ones(2, 4)
    with torch.no_grad():
        check = check_whole_model(describe_live(model, (x,)), lambda: model(x), lambda: model(x), Written(), **more)
    assert check.is_passed
    return check.oracle


def test_a_copy_is_compared_with_unless_a_rank_has_none():
    asked = []
    assert oracle_of(worst=lambda own: asked.append(own) or own) == "float64 copy"
    assert oracle_of(worst=lambda own: asked.append(own) or "rank 1: no copy") == "eager"
    assert asked == ["", "", ""]  # of the copy and of its run; of the copy


def test_a_copy_that_one_rank_cannot_run_is_compared_with_on_none():
    asked = []
    assert oracle_of(Narrow(RuntimeError("another dtype")), worst=lambda own: asked.append(own) or own) == "eager"
    assert asked == ["", "another dtype"]
    assert oracle_of(worst=lambda own: "rank 1: another dtype" if len(asked) > 2 else asked.append(own) or own) == "eager"
    assert oracle_of(Narrow(torch.OutOfMemoryError("no memory"))) == "eager"  # one process goes on
    with pytest.raises(torch.OutOfMemoryError):  # other ranks wait in the copy's collectives
        oracle_of(Narrow(torch.OutOfMemoryError("no memory")), worst=str)


def test_the_least_memory_of_all_ranks_decides():
    assert oracle_of(memory_bytes=lambda _: (100, 10**9)) == "eager"
    assert oracle_of(memory_bytes=lambda _: (10**9, 10**9)) == "float64 copy"
