"""Copies of whole runs stand in chains, at either end; transposes and what is repeated do not."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

import fusion_advisor as fa
from fusion_advisor.chains.find import find_groups
from fusion_advisor.chains.op_inputs import copies_runs
from fusion_advisor.fuse.plan.options import Budgets
from fusion_advisor.fuse.plan.plan import judge_with
from fusion_advisor.lowering.lower import lower
from tests.kernel_cases.lowered import records
from tests.tiny import BANDWIDTH

ROWS = torch.randn(2, 6, 8, 32)


def copies(function, x=ROWS):
    ops = records(function, x)
    return [op.target for op in ops if copies_runs(op, ops)]


def windows(x, size=2):
    batch, height, width, channels = x.shape
    x = x.view(batch, height // size, size, width // size, size, channels).permute(0, 1, 3, 2, 4, 5)
    return x.contiguous().view(-1, size * size, channels)


def test_runs_that_stay_whole_are_copied():
    assert copies(lambda x: windows(x) * 2) == ["aten.contiguous.default"]
    assert copies(lambda x: x.transpose(1, 2).reshape(2, 48, 32) * 2) == ["aten.reshape.default"]
    assert copies(lambda x: x.transpose(1, 2).reshape(2, 8, 192) * 2) == ["aten.reshape.default"]
    assert copies(lambda x: x[:, 1:].clone() * 2) == ["aten.clone.default"]


def test_transposes_short_runs_and_what_is_repeated_are_left_to_others():
    assert copies(lambda x: x.transpose(2, 3).contiguous() * 2) == []
    assert copies(lambda x: windows(x) * 2, torch.randn(2, 6, 8, 8)) == []
    assert copies(lambda x: x[:, :, None].expand(2, 6, 3, 8, 32).reshape(2, 18, 8, 32) * 2) == []
    assert copies(lambda x: x.contiguous() * 2) == []  # there is nothing to copy


def test_a_copy_and_a_repeat_of_it_are_one_chain():
    """As DeBERTa's position keys: neither is written to memory before the other reads it."""

    def keys(x, weight, queries):
        heads = (x @ weight).view(1, 24, 4, 32).permute(0, 2, 1, 3).contiguous().view(-1, 24, 32)
        return queries.bmm(heads.repeat(5, 1, 1).transpose(1, 2))

    ops = records(keys, torch.randn(1, 24, 128), torch.randn(128, 128), torch.randn(20, 24, 32))
    groups = find_groups(ops, lambda members, outputs: judge_with(ops, members, outputs))
    (group,) = [group for group in groups if any(".repeat." in ops[index].target for index in group.members)]
    assert [ops[index].target.split(".")[1] for index in group.members] == ["contiguous", "view", "repeat"]
    lowered = lower(ops, list(group.members), list(group.outputs))
    assert [value.op for value in lowered.program.values] == ["load"]
    assert lowered.program.dims == (5, 4, 24, 32)


class Windows(nn.Module):
    """A norm, windows, a linear over them, and the way back."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear, self.last = nn.LayerNorm(32), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x):
        mixed = self.linear(windows(self.norm(x)))
        back = mixed.view(2, 3, 4, 2, 2, 32).permute(0, 1, 3, 2, 4, 5).reshape(2, 6, 8, 32)
        return self.last(back + x)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_a_window_block_is_left_with_no_copy_of_its_own():
    model = Windows().eval()
    with torch.no_grad():
        expected = model(ROWS)
        fused = fa.apply(
            model, (ROWS,), keep="verified", min_share=0.0, warmup=1, runs=3, compile=False, bandwidth=BANDWIDTH,
            budgets=Budgets(wall_s=0.02),
        )  # fmt: skip
        torch.testing.assert_close(fused(ROWS), expected, rtol=1e-5, atol=1e-5)
    kept = [fusion for fusion in fused.report.fusions if fusion.status.value == "kept"]
    chains = {chain.id: chain.ops for chain in fused.report.chains}
    taken = sorted(chains[fusion.chain_id] for fusion in kept)
    assert taken == [("layer_norm", "contiguous"), ("reshape", "add", "layer_norm")]
