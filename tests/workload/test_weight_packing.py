"""Room behind weights: the same model, with memory for the rows that a padded GEMM reads."""

from __future__ import annotations

import copy
import operator

import torch
from torch import nn

from fusion_advisor.workload.weight_packing import (
    has_room,
    lay_out_siblings,
    lay_out_weights,
    leave_room,
    lie_together,
    lies_laid_out,
    padded_rows,
    roomy_rows,
)


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
    assert lay_out_siblings(model) == 2
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
    assert lay_out_siblings(model) == 2  # v and o
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
    assert lay_out_siblings(model) == 2
    assert torch.equal(model["k"].weight, memory[12:]) and model["k"].weight.data_ptr() != memory[12:].data_ptr()


def test_parameters_stay_the_same_objects_for_hooks_and_optimizers_and_subclasses_stay_where_they_are():
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(16, 16, dtype=torch.float64) for name in "qkv"})
    seen, own = [], list(model.parameters())
    model["q"].weight.register_hook(seen.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = copy.deepcopy(model.state_dict())
    assert not lies_laid_out(model) and lay_out_weights(model) == 6
    assert lies_laid_out(model) and lay_out_weights(model) == 0
    assert all(map(operator.is_, model.parameters(), own)) and all(map(torch.equal, model.state_dict().values(), before.values()))
    sum(linear(torch.ones(2, 16, dtype=torch.float64)).sum() for linear in model.values()).backward()
    optimizer.step()
    assert len(seen) == 1 and lies_laid_out(model)
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, before[name] - 0.5 * 2, rtol=0, atol=1e-12)

    class Counted(torch.Tensor):
        pass

    model["k"].weight = nn.Parameter(torch.randn(16, 16, dtype=torch.float64).as_subclass(Counted))
    model["v"].weight = nn.Parameter(model["v"].weight.detach().clone())
    assert lay_out_weights(model) == 4  # q's and v's


def test_a_model_made_in_inference_mode_is_laid_out():
    with torch.inference_mode():
        model = nn.ModuleDict({name: nn.Linear(16, 13, bias=False, dtype=torch.float16) for name in "qk"})
        values = [linear.weight.clone() for linear in model.values()]
        assert lay_out_weights(model) == 2
    assert all(torch.equal(linear.weight, value) for linear, value in zip(model.values(), values, strict=True))


def test_rows_are_rounded_up():
    assert [padded_rows(rows) for rows in (1, 8, 9, 50257)] == [8, 8, 16, 50264]


def test_seven_more_rows_hold_the_rounded_ones():
    assert [roomy_rows(rows) for rows in (1, 8, 9, 50257)] == [8, 8, 16, 50264]
    assert all(padded_rows(rows) <= roomy_rows(rows) for rows in range(1, 40))


def test_tensors_one_after_the_other_lie_together_and_others_do_not():
    memory = torch.randn(10, 4)
    a, b, c = memory[:2], memory[2:7], memory[7:]
    assert lie_together([a, b, c]) and lie_together([a, b]) and lie_together([b, c])
    assert not lie_together([a, c])
    assert not lie_together([b, a])
    assert not lie_together([a, a])
    assert not lie_together([a, b.clone()])
    assert not lie_together([a, memory.t()[2:]])
    assert not lie_together([memory[:, :2], memory[:, 2:]])
    assert not lie_together([a, b.view(torch.int32)])
    assert not lie_together([torch.randn(4), torch.randn(4)])
