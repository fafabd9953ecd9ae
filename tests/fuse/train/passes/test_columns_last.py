"""Sums that sink one after the other: what has sunk with one sum stays below it when another sum takes it along."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from fusion_advisor.fuse.train.passes.columns_last import sink_column_sums
from fusion_advisor.fuse.train.passes.gradient_parts import split_norm_gradients
from fusion_advisor.runtime.torch_internals import fx_trace
from tests.fuse.train.passes.test_gradient_parts import passes


class TimeMix(nn.Module):
    """RWKV's shares of a row and of the row before it: each share's gradient is the difference of two sums of columns."""

    def __init__(self):
        super().__init__()
        self.shares = nn.ParameterList(torch.rand(1, 1, 16) for _ in range(3))
        self.ins = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x):
        before = functional.pad(x, (0, 0, 1, -1))
        mixed = [x * share + before * (1 - share) for share in self.shares]
        key, value, gate = (into(row) for into, row in zip(self.ins, mixed, strict=True))
        return torch.sigmoid(gate) * key * value


def test_a_difference_of_two_sums_stays_below_both():
    torch.manual_seed(0)
    (backward,) = passes(TimeMix(), x=torch.randn(3, 5, 16, requires_grad=True))["backward"]
    inputs = [torch.randn(node.meta["val"].shape) for node in backward.graph.nodes if node.op == "placeholder"]
    before = backward(*inputs)
    sunk = sink_column_sums(split_norm_gradients(fx_trace.copied_graph(backward)))
    assert [node.name for node in sunk.graph.nodes] != [node.name for node in backward.graph.nodes]
    for one, other in zip(before, sunk(*inputs), strict=True):
        assert one is other is None or torch.equal(one, other)
