"""Room behind weights: the same model, with memory for the rows that a padded GEMM reads."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fusion_advisor.workload.weight_packing import has_room, lay_out_siblings, leave_room, padded_rows, roomy_rows


class Tied(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(13, 16, dtype=dtype)
        self.head = nn.Linear(16, 13, bias=False, dtype=dtype)
        self.head.weight = self.words.weight
        self.odd = nn.Linear(16, 3, dtype=dtype)
        self.even = nn.Linear(16, 8, dtype=dtype)


def test_odd_weights_get_room_and_the_model_stays_the_same():
    model = Tied(torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    even = model.even.weight
    assert leave_room(model) == 3  # the tied weight once, odd's weight and bias
    assert model.head.weight is model.words.weight and model.even.weight is even
    for tensor, rows in ((model.head.weight, 20), (model.odd.weight, 10), (model.odd.bias, 10)):
        assert has_room(tensor, rows) and not has_room(tensor, rows + 1)
        assert tensor.is_contiguous() and tensor.requires_grad
    after = model.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=0)
    assert leave_room(model) == 0


def test_wide_dtypes_and_weights_that_lie_in_a_common_storage_stay():
    assert leave_room(Tied(torch.float32)) == 0
    model = nn.ModuleDict({name: nn.Linear(16, 12, bias=False, dtype=torch.float16) for name in "qk"})
    assert lay_out_siblings(model) == 1
    storage = model["q"].weight.untyped_storage().data_ptr()
    assert leave_room(model) == 0
    assert model["k"].weight.untyped_storage().data_ptr() == storage


def test_weights_tied_by_their_memory_and_parameters_of_no_rows_stay():
    model = Tied(torch.float16)
    model.head.weight = nn.Parameter(model.words.weight.detach())
    model.odd.register_parameter("scale", nn.Parameter(torch.ones((), dtype=torch.float16)))
    assert leave_room(model) == 2  # odd's weight and bias
    with torch.no_grad():
        model.words.weight.zero_()
    assert not model.head.weight.any()


def siblings(**weights):
    model = nn.ModuleDict({name: nn.Linear(16, weight.shape[0], bias=False) for name, weight in weights.items()})
    for name, weight in weights.items():
        model[name].weight = nn.Parameter(weight)
    return model


def test_siblings_tied_by_their_memory_stay():
    memory = torch.randn(20, 16)
    model = siblings(q=memory[:12], k=memory[8:], v=torch.randn(8, 16), o=torch.randn(8, 16))
    places = [model[name].weight.data_ptr() for name in "qk"]
    assert lay_out_siblings(model) == 1  # v and o
    assert [model[name].weight.data_ptr() for name in "qk"] == places
    assert model["o"].weight.data_ptr() == model["v"].weight.data_ptr() + 8 * 16 * 4
    model = siblings(q=torch.randn(8, 16), k=torch.randn(8, 16))
    model["k"].register_buffer("first", model["k"].weight.detach()[0])
    assert lay_out_siblings(model) == 0
    with torch.no_grad():
        model["k"].weight.fill_(3)
    assert bool((model["k"].first == 3).all())


def test_siblings_beside_each_other_in_one_storage_are_laid_out():
    memory = torch.randn(20, 16)
    model = siblings(q=memory[:8], k=memory[12:])
    assert lay_out_siblings(model) == 1
    assert torch.equal(model["k"].weight, memory[12:]) and model["k"].weight.data_ptr() != memory[12:].data_ptr()


def test_parameters_that_are_more_than_their_values_stay():
    model = nn.ModuleDict({name: nn.Linear(16, 12, bias=False, dtype=torch.float16) for name in "qk"})
    model["q"].weight.register_hook(lambda gradient: gradient)
    assert lay_out_siblings(model) == 0
    assert leave_room(model) == 1


def test_rows_are_rounded_up():
    assert [padded_rows(rows) for rows in (1, 8, 9, 50257)] == [8, 8, 16, 50264]


def test_seven_more_rows_hold_the_rounded_ones():
    assert [roomy_rows(rows) for rows in (1, 8, 9, 50257)] == [8, 8, 16, 50264]
    assert all(padded_rows(rows) <= roomy_rows(rows) for rows in range(1, 40))
