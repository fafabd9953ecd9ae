"""Rows that are turned after a norm or a log-softmax, as Swin averages its tokens: torch traces other strides than it makes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.fuse.train.test_trained_graph import WIDTH, Block, gradients, step
from tests.fuse.train.test_trained_model import applied, compare


class Pooled(nn.Module):
    """A block, and the mean over its tokens of rows that were turned."""

    def __init__(self):
        super().__init__()
        self.block, self.norm, self.weights = Block(), nn.LayerNorm(WIDTH), nn.Parameter(torch.rand(5))

    def forward(self, x):
        return functional.gelu(self.norm(self.block(x)).transpose(1, 2) * self.weights).mean(2)


class Classes(Pooled):
    """Logarithms of probabilities with the classes in the middle, as ``nll_loss`` takes them."""

    def forward(self, x):
        return (self.norm(self.block(x)).log_softmax(-1).transpose(1, 2) * self.weights).sin()


@pytest.mark.parametrize("make", [Pooled, Classes])
def test_every_chain_of_both_passes_is_served(make):
    torch.manual_seed(0)
    model, x = make().train(), torch.randn(8, 5, WIDTH)
    plain, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    fused = applied(model, (x,))
    assert not [fusion.reason for fusion in fused.report.fusions if fusion.status.value != "kept"]
    assert step(model, x).isclose(step(plain, x)) and fused.launches > 3
    compare(gradients(model), gradients(plain))
    step(wide, x.double())
    for name, true in gradients(wide).items():
        ours, eagers = (float((gradients(one)[name] - true).norm() / true.norm()) for one in (model, plain))
        assert ours <= 3 * eagers + 2e-6, (name, ours, eagers)
    torch.compiler.reset()
