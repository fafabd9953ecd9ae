"""A fused model inside functions that somebody else's torch.compile compiles: it is served there too, or says why not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fusion_advisor as fa
from tests.fuse.train.test_trained_graph import WIDTH, Block, gradients
from tests.fuse.train.test_trained_model import OPTIONS, applied, compare


class Around(nn.Module):
    """A model of somebody's that holds the fused one."""

    def __init__(self, model):
        super().__init__()
        self.model, self.gain = model, nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, x):
        return self.model(x * 1.5) * self.gain


@pytest.fixture(scope="module")
def x():
    return torch.randn(8, 5, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def pair(x):
    torch.manual_seed(0)
    model = Block().train()
    plain = copy.deepcopy(model)
    yield applied(model, (x,)), plain
    torch.compiler.reset()


def loss_of(model, x):
    return (2 * model(x)).square().mean()


def step(model, x):
    model.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    return loss.detach()


def loss_around(model, x):
    return loss_of(Around(model), x)


def loss_of_compiled(model, x):
    return loss_of(torch.compile(model, backend="eager"), x)


@pytest.mark.parametrize("function", [loss_of, step, loss_around, loss_of_compiled])
def test_kernels_run_and_gradients_are_eagers(pair, x, function):
    fused, plain = pair
    fused.fallbacks.clear()
    fused.apply()
    launched = []
    for model in (fused.model, plain):
        model.zero_grad()
        compiled = function if function is loss_of_compiled else torch.compile(function, backend="eager")
        before = fused.launches
        loss = compiled(model, x)
        if loss.requires_grad:
            loss.backward()
        launched.append(fused.launches - before)
    assert launched[0] > 3 and not launched[1] and not fused.fallbacks
    compare(gradients(fused.model), gradients(plain))


def test_what_was_compiled_while_it_was_in_place_follows_its_revert(pair, x):
    fused, plain = pair

    def loss_of(model, x):
        return (3 * model(x)).square().mean()

    compiled = torch.compile(loss_of, backend="eager")
    for is_in_place in (True, False, True):
        (fused.apply if is_in_place else fused.revert)()
        before = fused.launches
        torch.testing.assert_close(compiled(fused.model, x), loss_of(plain, x))
        assert (fused.launches > before) is is_in_place


def test_one_graph_of_all_is_refused_with_what_to_do(pair, x):
    fused, _ = pair
    fused.apply()

    def loss_of(model, x):  # compiled by no other test
        return model(x).square().mean()

    with pytest.raises(Exception, match=r"compile without fullgraph=True, or call revert\(\)"):
        torch.compile(loss_of, backend="eager", fullgraph=True)(fused.model, x)
    fused.revert()
    torch.compile(loss_of, backend="eager", fullgraph=True)(fused.model, x).backward()


def test_a_model_that_only_infers_is_served_too(x):
    torch.manual_seed(0)
    model = Block().eval()
    with torch.no_grad():
        expected = 2 * model(x) + 1
        fused = fa.apply(model, (x,), **{**OPTIONS, "phase": "forward"})
        assert fused.is_applied
        torch.testing.assert_close(torch.compile(lambda x: 2 * model(x) + 1, backend="eager")(x), expected)
    assert fused.launches > 0 and not fused.fallbacks
    fused.revert()
