"""Hooks on the parameters of a head that no loss of a step leads to: they are called as in eager, which calls none of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.fuse.train.test_trained_graph import WIDTH, Block, gradients
from tests.fuse.train.test_trained_model import applied, compare


class Heads(nn.Module):
    """A block with two heads."""

    def __init__(self):
        super().__init__()
        self.block, self.first, self.second = Block(), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.block(x)
        return self.first(x), self.second(x)


@pytest.mark.parametrize("place", [0, 1])
def test_hooks_of_the_other_head_are_not_called(place):
    torch.manual_seed(0)
    model, x = Heads().train(), torch.randn(8, 5, WIDTH)
    plain, calls = copy.deepcopy(model), {}
    fused = applied(model, (x,))
    for one in (model, plain):
        calls[one] = []
        for name, parameter in one.named_parameters():
            handle = parameter.register_hook(lambda gradient, name=name, one=one: calls[one].append(name) or 0.5 * gradient)
        one(x)[place].square().mean().backward()
        one(x)[1 - place].square().mean().backward()
        handle.remove()
        several = torch.autograd.graph.register_multi_grad_hook(
            list(one.parameters()), lambda found, one=one: calls[one].append(str(sum(gradient is None for gradient in found)))
        )
        one(x)[place].square().mean().backward()
        several.remove()
    assert sorted(calls[model]) == sorted(calls[plain]) and fused.launches > 0 and not fused.fallbacks
    compare(gradients(model), gradients(plain))
    torch.compiler.reset()
