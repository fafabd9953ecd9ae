"""A net in channels last whose norms have several groups: its kernels are put in, with right numbers and layouts."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

import fusion_advisor as fa
from fusion_advisor.fuse.plan.options import Budgets
from tests.tiny import BANDWIDTH

LAST = torch.channels_last


class Block(nn.Module):
    """A diffusion net's, without its time."""

    def __init__(self, channels):
        super().__init__()
        self.first, self.second = (nn.GroupNorm(4, channels) for _ in range(2))
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, images):
        inner = self.one(nn.functional.silu(self.first(images)))
        return images + self.two(nn.functional.silu(self.second(inner)))


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_norms_of_groups_stay_in_channels_last():
    torch.manual_seed(0)
    model = nn.Sequential(Block(16), Block(16), nn.Upsample(scale_factor=2.0), Block(16)).eval().to(memory_format=LAST)
    images = torch.randn(2, 16, 12, 12).to(memory_format=LAST)
    with torch.no_grad():
        expected, truth = model(images), model.double()(images.double())
        model.float()
        fused = fa.apply(
            model, (images,), keep="verified", min_share=0.0, warmup=1, runs=3, compile=False, bandwidth=BANDWIDTH,
            budgets=Budgets(wall_s=0.02),
        )  # fmt: skip
        got = fused(images)
    own = (expected - truth).abs().max().item()
    assert (got - truth).abs().max().item() <= 2 * own + 1e-6
    assert got.is_contiguous(memory_format=LAST)
    ops = {chain.id: chain.ops for chain in fused.report.chains}
    kept = [ops[one.chain_id] for one in fused.report.fusions if one.status.value == "kept" and one.chain_id]
    norms = [names for names in kept if "group_norm" in names]
    assert norms and all(names[-2:] == ("group_norm", "silu") for names in norms)
    found = sum(one.receipt.sites_replaced for one in fused.report.fusions if one.chain_id and "group_norm" in ops[one.chain_id])
    assert found == 6
    fused.revert()
    with torch.no_grad():
        assert torch.equal(model(images), expected)
