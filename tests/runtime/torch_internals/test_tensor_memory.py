"""Storages: one test for each private API of torch that is used, which names it when a release moves it."""

from __future__ import annotations

import ctypes
import gc
import weakref

import pytest
import torch

from fusion_advisor.runtime.torch_internals import fake_mode, tensor_memory


@pytest.mark.parametrize("make", [lambda tensor: tensor, lambda tensor: fake_mode.fake_tensors([tensor])[0]])
def test_storage_key_is_shared_by_views_alone(make):
    tensor = make(torch.randn(4, 4))
    assert tensor_memory.storage_key(tensor) == tensor_memory.storage_key(tensor[1:].view(-1))
    assert tensor_memory.storage_key(tensor) != tensor_memory.storage_key(tensor.clone())


@pytest.mark.parametrize("make", [torch.ones, lambda *sizes: torch.nn.Parameter(torch.ones(*sizes))])
def test_another_dtype_or_shape_changes_the_words_and_numbers_leave_them(make):
    tensor = make(2, 3, 4, 5)
    words = [ctypes.c_uint64.from_address(place) for place in tensor_memory.layout_places(tensor)]
    assert len(words) >= 6
    before = [word.value for word in words]
    tensor.data.mul_(2)
    tensor.data = torch.zeros(2, 3, 4, 5)
    assert [word.value for word in words] == before
    others = [torch.zeros(2, 3, 4, 5, dtype=other) for other in (torch.bfloat16, torch.float64)]
    for other in (*others, torch.zeros(3, 2, 4, 5), torch.zeros(2, 3, 5, 4), torch.zeros(1, 3, 4, 5), torch.zeros(120)):
        tensor.data = other
        assert [word.value for word in words] != before


def test_addresses_are_those_of_the_same_tensors_only():
    tensors = [torch.randn(4) for _ in range(3)]
    addresses = tensor_memory.Addresses(tensors)
    assert addresses.are_of(tensors)
    assert not addresses.are_of(tensors[:2])
    assert not addresses.are_of([*tensors[:2], tensors[2].clone()])
    assert not addresses.are_of([tensors[1], tensors[0], tensors[2]])
    tensors[1].data = torch.randn(4)
    assert not addresses.are_of(tensors)


@pytest.mark.parametrize("tensor", [torch.randn(4, 3)[1:], torch.tensor(2.0), torch.arange(3), torch.randn(2).to(torch.bfloat16)])
def test_the_same_memory_in_a_storage_of_its_own_is_freed_by_itself(tensor):
    freed = []
    other = tensor_memory.with_own_storage(tensor)
    assert (other.data_ptr(), other.shape, other.dtype) == (tensor.data_ptr(), tensor.shape, tensor.dtype)
    assert tensor_memory.storage_key(other) != tensor_memory.storage_key(tensor)
    reference = tensor_memory.storage_reference(other, freed.append)
    part = other.detach()
    del other
    assert not freed
    before = tensor.clone()
    del part
    assert freed == [reference] and torch.equal(tensor, before)


def watched_storage(device):
    freed = []
    parameter = torch.nn.Parameter(torch.randn(4, device=device))
    reference = tensor_memory.storage_reference(parameter, freed.append)
    parameter.untyped_storage()  # a Python object that comes and goes is not the memory's end
    assert reference() is not None and freed == []
    held, parameter.data = parameter.data, torch.randn(4, device=device)
    assert reference() is not None and freed == []
    del held
    assert freed == [reference] and reference() is None


def test_a_storage_is_seen_to_be_freed_under_a_living_tensor():
    watched_storage("cpu")


@pytest.mark.gpu
def test_a_storage_is_seen_to_be_freed_on_a_gpu():
    watched_storage("cuda")


@pytest.mark.gpu
def test_addresses_on_a_gpu():
    tensors = [torch.randn(4, device="cuda") for _ in range(3)]
    addresses = tensor_memory.Addresses(tensors)
    assert addresses._at_once is not None
    assert addresses.are_of(tensors) and not addresses.are_of([*tensors[:2], tensors[2].clone()])


def test_a_backward_pass_is_retained_where_its_caller_asks():
    seen = []

    class Told(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(tensor_memory.is_retained())
            return gradient

    loss = Told.apply(torch.ones(2, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert seen == [True, False]


def test_on_a_cpu_a_tensor_holds_its_memory():
    tensor = torch.randn(4)
    assert tensor_memory.without_memory(tensor, None) is tensor


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool, torch.int64])
def test_memory_is_read_and_not_held(dtype):
    class Holder:
        pass

    holder, before = Holder(), torch.cuda.memory_allocated()
    tensor = torch.randn(64, 1024, device="cuda").to(dtype)[1:].t()
    expected, other = tensor.clone(), tensor_memory.without_memory(tensor, holder)
    assert (other.data_ptr(), other.shape, other.stride(), other.dtype) == (
        tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype,
    )  # fmt: skip
    assert torch.equal(other, expected) and not other.requires_grad
    alive = weakref.ref(holder)
    del holder, expected
    assert alive() is not None
    allocated = torch.cuda.memory_allocated()
    del tensor
    assert before <= torch.cuda.memory_allocated() < allocated
    del other
    gc.collect()
    assert alive() is None
