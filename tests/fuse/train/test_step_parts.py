"""Times of AdamW's ways over copies of a model's parameters, and where none is taken."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.fuse.train.step_parts import Clocked, time_optimizers
from fusion_advisor.timing.host_timer import WallTimer


@pytest.fixture
def how():
    return Clocked(on_cuda=False, rounds=2, budget_s=0.01, timer=WallTimer())


def test_all_ways_are_timed_and_no_parameter_changes(how):
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2), requires_grad=False)]
    times, reason = time_optimizers(parameters, how)
    assert [one.change.partition("(")[2] for one in times] == [
        "model.parameters())", "model.parameters(), foreach=True)", "model.parameters(), fused=True)",
    ]  # fmt: skip
    assert reason == "" and all(one.step_ns > 0 for one in times)
    assert all(one.grad is None and bool((one == 1).all()) for one in parameters)


def test_complex_parameters_end_no_run(how):
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, dtype=torch.cfloat))]
    assert time_optimizers(parameters, how) == ((), "a parameter is complex: fused AdamW takes floating-point ones alone")


def test_a_step_that_trains_no_parameter_has_no_optimizer(how):
    frozen = [torch.nn.Parameter(torch.ones(2), requires_grad=False)]
    assert time_optimizers(frozen, how) == ((), "the step trains no parameter: its gradients are those of its inputs")
