"""Inputs that ask for gradients: ``fa.apply`` leaves the caller's gradients, graph and hooks alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fusion_advisor.fuse.modes.training import profile_training
from fusion_advisor.fuse.plan.options import ProfileOptions
from fusion_advisor.workload.load import describe_live
from tests.fuse.train.test_trained_graph import WIDTH, Block
from tests.fuse.train.test_trained_model import OPTIONS, applied


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


def numbers(rows=8):
    return torch.randn(rows, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def compare(ours, plain, true, factor=3):
    """Our distance from fp64 is at most some times eager's."""
    size = true.norm()
    mine, theirs = (float((one.double() - true).norm() / size) for one in (ours, plain))
    assert mine <= factor * theirs + 1e-6, (mine, theirs)


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_an_input_keeps_the_gradient_that_it_has(kind):
    model = Block().train()
    plain, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    x = numbers().requires_grad_() if kind is torch.Tensor else nn.Parameter(numbers())
    fused = applied(model, (x,))
    assert x.grad is None
    others = [x.detach().clone().to(dtype).requires_grad_() for dtype in (torch.float32, torch.float64)]
    for one, given in zip((model, plain, wide), (x, *others), strict=True):
        one(given).square().mean().backward()
    compare(x.grad, *(one.grad for one in others))
    assert fused.launches > 0 and not fused.fallbacks


def test_the_graph_in_front_of_the_model_is_not_run_backward():
    front, model = nn.Linear(WIDTH, WIDTH), Block().train()
    twins = [copy.deepcopy(nn.Sequential(front, model)).to(dtype) for dtype in (torch.float32, torch.float64)]
    hidden, seen = front(numbers()), []
    hidden.register_hook(seen.append)
    fused = applied(model, (hidden,))
    assert front.weight.grad is None and not seen
    model(hidden).square().mean().backward()  # the graph is there still
    for one in twins:
        one(numbers().to(one[0].weight.dtype)).square().mean().backward()
    compare(front.weight.grad, *(one[0].weight.grad for one in twins))
    assert len(seen) == 1 and fused.launches > 0 and not fused.fallbacks


def test_a_profile_leaves_them_alone_too():
    front, model = nn.Linear(WIDTH, WIDTH), Block().train()
    hidden, x = front(numbers()), numbers().requires_grad_()
    how = ProfileOptions(**{name: OPTIONS[name] for name in ("bandwidth", "warmup", "runs", "steps", "budgets")})
    for given in (hidden, x):
        profile_training(describe_live(model, (given,), {}, phase="train"), how)
    assert front.weight.grad is None and x.grad is None
    hidden.sum().backward()


def test_a_model_that_is_called_with_its_own_parameter_trains():
    model = Block().train()
    model.prompt = nn.Parameter(numbers())
    plain, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    fused = applied(model, (model.prompt,))
    assert model.prompt.grad is None
    for one in (model, plain, wide):
        one(one.prompt).square().mean().backward()
    compare(*(one.prompt.grad for one in (model, plain, wide)))
    assert fused.launches > 0 and not fused.fallbacks
