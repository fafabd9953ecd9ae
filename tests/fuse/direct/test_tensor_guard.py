"""A tensor that is given another dtype or shape is named; other writes, and tensors in the place of others, are not."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from fusion_advisor.fuse.direct.tensor_guard import WatchedTensors


@pytest.fixture
def model():
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))


@pytest.fixture(params=[True, False], ids=["words", "Python"])
def watched(request, model):
    return WatchedTensors(model, in_words=request.param)


def test_a_parameter_with_other_data_is_named_until_it_is_as_it_was(model, watched):
    assert watched.change() is None and watched.change() is None
    model.bfloat16()
    for _ in range(2):
        assert watched.change() == "`weight` is bfloat16[3, 3], and was float32[3, 3] when the model was verified"
    model.float()
    assert watched.change() is None and watched.change() is None


def test_a_buffer_is_named_too(model, watched):
    assert watched.change() is None
    model[1].running_var = model[1].running_var.double()
    assert "running_var" in (watched.change() or "")


def test_numbers_strides_and_other_tensors_of_the_same_layout_are_no_change(model, watched):
    assert watched.change() is None
    with torch.no_grad():
        model[0].weight.mul_(2)
    model[0].weight.data = torch.ones(3, 3).t()
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


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (9, 1), (3,)], ids=str)
def test_a_parameter_of_another_shape_is_named_until_it_is_as_it_was(model, watched, shape):
    assert watched.change() is None
    model[0].weight.data = torch.ones(shape)
    assert watched.change() == f"`weight` is float32{list(shape)}, and was float32[3, 3] when the model was verified"
    model[0].weight.data = torch.ones(3, 3)
    assert watched.change() is None


def test_a_buffer_may_grow(model, watched):
    assert watched.change() is None
    model[1].running_var = torch.ones(5)
    assert watched.change() is None
