"""Most bytes of a training step stand in chains, and the ops outside are the few that are known."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fusion_advisor.records import OpNode
from tests.kernel_cases.lowered import records
from tools.training_chains import MODELS, Share, share_of, shares, whole

LEAST = {"llama": 0.97, "qwen2": 0.96, "bert": 0.86, "vit": 0.98}
"""Shares in chains."""
LOWERED = {"slice_backward", "select_backward", "_safe_softmax", "sum"}
"""Ops that were outside once."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAST)
def test_a_models_step_is_mostly_chains(name):
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    inside, outside = whole(shares(model, **inputs))
    assert inside >= LEAST[name], outside
    assert not LOWERED & {op for op, share in outside.items() if share >= 0.001}, outside


def test_ops_outside_chains_are_counted_by_what_they_move():
    def step(x):
        return torch.exp(x * 2).cumsum(0), x @ x

    found = share_of(records(step, torch.ones(4, 4)), "forward")
    assert (found.training_pass, found.chained_bytes, found.all_bytes) == ("forward", 256, 384)
    assert found.outside_bytes == {"cumsum": 128}


def test_a_loss_reads_one_number_of_each_row():
    def step(logs, target):
        return torch.ops.aten.nll_loss_forward(logs, target, None, 1, -100)[0]

    ops: list[OpNode] = records(step, torch.randn(6, 1000), torch.arange(6))
    assert share_of(ops, "forward").outside_bytes == {"nll_loss_forward": 2 * 6 * 8}


def test_passes_are_added():
    found = [Share("forward", 60, 100, Counter(a=40)), Share("backward", 100, 100, Counter())]
    assert whole(found) == (0.8, {"a": 0.2}) and whole([]) == (0.0, {})
