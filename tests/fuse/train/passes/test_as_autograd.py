"""What autograd gives a backward pass beside one gradient for each output: none for some of them, or a batch of them at once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.fuse.train.kept_graphs import KeptGraphs
from tests.fuse.train.test_trained_graph import WIDTH, Block, compare, gradients


class TwoHeads(nn.Module):
    """A block whose result three heads read; what one returns is read by the next."""

    def __init__(self):
        super().__init__()
        self.block, self.first, self.second = Block(), nn.Linear(WIDTH, 4), nn.Linear(4, 3)
        self.third = nn.Linear(WIDTH, 2)

    def forward(self, x):
        rows = self.block(x)
        first = torch.tanh(self.first(rows))
        return first, torch.tanh(self.second(first)), torch.tanh(self.third(rows))


@pytest.fixture
def made():
    torch.manual_seed(0)
    model, backend = TwoHeads(), KeptGraphs()
    yield model, copy.deepcopy(model), torch.compile(model, backend=backend, dynamic=False), backend
    torch.compiler.reset()


@pytest.fixture
def x():
    return torch.randn(8, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def test_heads_that_are_trained_in_turn_leave_each_others_weights_alone(made, x):
    """With AdamW, which moves a weight whose gradient is zeros; its eps keeps gradients of rounding alone from moving any far."""
    model, plain, compiled, backend = made
    compiled(x)
    weights = []
    for one, call in ((model, compiled), (plain, plain)):
        optimizer, seen = torch.optim.AdamW(one.parameters(), lr=1e-2, weight_decay=0.5, eps=1e-4), []
        for number in range(6):
            optimizer.zero_grad()
            call(x)[number % 3].square().mean().backward()
            seen.append({name for name, parameter in one.named_parameters() if parameter.grad is None})
            optimizer.step()
        weights.append(({name: one.detach() for name, one in one.named_parameters()}, seen))
    (ours, mine), (theirs, own) = weights
    assert mine == own and all(own)
    compare(ours, theirs)
    (graph,) = backend.graphs
    assert graph.is_rewritten and all(half.is_changed for half in graph.halves)


def test_a_weight_that_any_given_gradient_leads_to_has_one(made, x):
    model, plain, compiled, _ = made
    compiled(x)
    for call in (compiled, plain):
        first, _, third = call(x)
        (first.square().mean() + 0 * third.sum()).backward()
    assert model.second.weight.grad is None and not model.third.weight.grad.any()
    compare(gradients(model), gradients(plain))


def test_a_batch_of_gradients_at_once(made, x):
    """Torch refuses the same under ``torch.func.vmap`` by itself."""
    model, plain, compiled, _ = made
    compiled(x)
    found = []
    for one, call in ((model, compiled), (plain, plain)):
        mean, weights = call(x)[0].mean((0, 1)), [*one.block.parameters(), *one.first.parameters()]
        rows = torch.autograd.grad(mean, weights, torch.eye(4), is_grads_batched=True)
        found.append({str(place): row for place, row in enumerate(rows)})
    assert len(found[0]) > 4
    compare(*found)
