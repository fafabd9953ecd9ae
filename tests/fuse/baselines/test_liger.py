"""Liger's patches on a copy: the model, its module and torch are as they were, and the weights are shared."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from fusion_advisor.fuse.baselines.liger import NotAvailable, with_liger
from fusion_advisor.workload.load import describe_live


def scale(x):
    return x * 2


class Norm(torch.nn.Module):
    def forward(self, x):
        return scale(x) + 1


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(4, 4), Norm()
        self.config = types.SimpleNamespace(model_type="net")

    def forward(self, x):
        return self.norm(self.linear(x))


@pytest.fixture
def load():
    return describe_live(Net().eval(), (torch.randn(2, 4),))


def patch_with(monkeypatch, patch):
    module = types.ModuleType("liger_kernel.transformers")
    module.apply_liger_kernel_to_net = patch
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)


def test_patches_are_in_place_only_while_the_copy_runs(load, monkeypatch):
    here = sys.modules[__name__]
    given = {}

    def patch(rope=True, model=None):
        given.update(rope=rope, model=model)
        here.scale = lambda x: x * 3  # a name of the model's module
        here.leftover = 1  # a new one
        Norm.forward = lambda self, x: scale(x) + 10  # a class
        torch.nn.functional.cross_entropy = None
        model.linear.forward = lambda x: x  # the instance itself

    patch_with(monkeypatch, patch)
    original = torch.nn.functional.cross_entropy, Norm.forward, scale
    (x,) = load.args
    before = load.model(x)
    call = with_liger(load)
    assert (torch.nn.functional.cross_entropy, Norm.forward, here.scale) == original
    assert not hasattr(here, "leftover")
    torch.testing.assert_close(call(), x * 3 + 10)
    assert (torch.nn.functional.cross_entropy, Norm.forward, here.scale) == original
    assert not hasattr(here, "leftover")
    torch.testing.assert_close(load.model(x), before)
    assert given["rope"] is False and given["model"] is not load.model
    assert given["model"].linear.weight is load.model.linear.weight


def test_a_patch_that_fails_leaves_nothing_behind(load, monkeypatch):
    def patch(model=None):
        sys.modules[__name__].scale = None
        raise ValueError("this version does not know this model")

    patch_with(monkeypatch, patch)
    kept = scale
    with pytest.raises(ValueError, match="this version"):
        with_liger(load)
    assert scale is kept


def test_a_model_that_it_does_not_know_and_its_absence_are_told(load, monkeypatch):
    patch_with(monkeypatch, lambda model=None: None)
    load.model.config.model_type = "other"
    with pytest.raises(NotAvailable, match="no kernels for other"):
        with_liger(load)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(NotAvailable, match="pip install liger-kernel"):
        with_liger(load)
