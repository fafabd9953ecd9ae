"""A tensor that is given another dtype is named; other writes, and tensors in the place of others, are not."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from fusion_advisor.fuse.direct.dtype_guard import WatchedDtypes


@pytest.fixture
def model():
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))


@pytest.fixture(params=[True, False], ids=["words", "Python"])
def watched(request, model):
    return WatchedDtypes(model, in_words=request.param)


def test_a_parameter_with_other_data_is_named_until_it_is_as_it_was(model, watched):
    assert watched.change() is None and watched.change() is None
    model.bfloat16()
    for _ in range(2):
        assert watched.change() == "`weight` is in bfloat16, and was in float32 when the model was verified"
    model.float()
    assert watched.change() is None and watched.change() is None


def test_a_buffer_is_named_too(model, watched):
    assert watched.change() is None
    model[1].running_var = model[1].running_var.double()
    assert "running_var" in (watched.change() or "")


def test_numbers_sizes_and_other_tensors_of_the_same_dtype_are_no_change(model, watched):
    assert watched.change() is None
    with torch.no_grad():
        model[0].weight.mul_(2)
    model[0].weight.data = torch.ones(5, 3).t()
    model[0].bias = torch.nn.Parameter(torch.ones(3))
    assert watched.change() is None and watched.change() is None
    model[0].bias.data = model[0].bias.data.half()
    assert "bias" in (watched.change() or "")


def test_a_replaced_parameter_is_freed_by_the_next_call(model, watched):
    assert watched.change() is None
    old = weakref.ref(model[0].weight)
    model[0].weight = torch.nn.Parameter(torch.ones(3, 3))
    gc.collect()
    assert old() is None and watched.change() is None
