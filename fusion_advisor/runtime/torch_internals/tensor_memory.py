"""Storages: which tensors share memory, where they lie, and when their memory is freed."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch


def storage_key(value: torch.Tensor) -> int:
    """Return a key that two (fake or real) tensors share exactly when they share storage."""
    return int(value.untyped_storage()._cdata)


def storage_reference(tensor: torch.Tensor, freed: Callable[[Any], object]) -> weakref.ref[torch.UntypedStorage]:
    """Return a weak reference to a tensor's memory; ``freed`` is called with it when nothing holds that memory any longer.

    A storage's Python object lives as long as the storage, whoever holds it: a tensor whose ``data`` was given other memory lets
    go of the old one although the tensor lives on.
    """
    return weakref.ref(tensor.untyped_storage(), freed)


_WORD = 8
_IMPL_WORDS = 24
"""Of torch's 200 bytes for a tensor."""


def layout_places(tensor: torch.Tensor) -> list[int]:
    """Return the addresses of the words that hold a tensor's dtype and first four sizes; empty where they are not known."""
    return [int(tensor._cdata) + word * _WORD for word in _layout_words()]


@functools.cache
def _layout_words() -> tuple[int, ...]:
    """Find the words that another dtype of the same size changes, and those that other sizes with the same strides do."""
    tensor = torch.zeros(2, 3, 4, 5, dtype=torch.float32, device="cpu")
    words = (ctypes.c_uint64 * _IMPL_WORDS).from_address(int(tensor._cdata))
    found: set[int] = set()
    for other, least in ((tensor.view(torch.int32), 1), (tensor[:1, :2, :3, :4], 5)):  # four sizes and their product
        before = list(words)
        tensor.data = other
        changed = {place for place, (now, then) in enumerate(zip(words, before, strict=True)) if now != then}
        if not least <= len(changed) <= least + 1:
            return ()
        found |= changed
    return tuple(sorted(found))


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory in a storage of its own: when that is freed, the memory itself is not.

    The storage holds the tensor that is given as long as it lives.
    """
    return torch.utils.dlpack.from_dlpack(torch._C._to_dlpack(tensor))


def is_retained() -> bool:
    """Whether the backward pass under way in this thread leaves what was kept for it, as ``retain_graph`` asks."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


class _Span:
    """Memory of a GPU as torch takes it from another library: it asks for no more than where it lies.

    Args:
        address: of its first byte.
        nbytes: of it.
        holder: lives as long as the tensor that is made of it.
    """

    def __init__(self, address: int, nbytes: int, holder: object) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2,
        }  # fmt: skip
        self.holder = holder


def without_memory(tensor: torch.Tensor, holder: object) -> torch.Tensor:
    """Return a tensor over the same memory that does not keep the allocator from giving it away.

    Whoever reads it must know what lies there. On a CPU, and where nothing lies in memory, it is the tensor itself.

    Args:
        tensor: on a GPU, of plain strides.
        holder: keeps the memory mapped; lives as long as the tensor that is returned.
    """
    storage = tensor.untyped_storage()
    if not tensor.is_cuda or not storage.nbytes() or tensor.is_conj() or tensor.is_neg():
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        nbytes = storage.nbytes() // tensor.element_size() * tensor.element_size()
        span = torch.as_tensor(_Span(storage.data_ptr(), nbytes, holder), device=tensor.device)
        return span.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Addresses:
    """Addresses of tensors' data: 425 are compared in 47 µs of Python, in a fraction of it where torch can in C++ (CUDA builds).

    Source: torch's CUDA graph trees ask this of their own static inputs.
    """

    __slots__ = ("_at_once", "_places", "_values")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._values = [tensor.data_ptr() for tensor in tensors]
        self._places = list(range(len(tensors)))
        self._at_once = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)

    @staticmethod
    def are_read_at_once() -> bool:
        """Whether torch compares all of them in C++."""
        return hasattr(torch._C, "_tensors_data_ptrs_at_indices_equal")

    def are_of(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these, as many and in this order, lie there."""
        if len(tensors) != len(self._values):
            return False
        if self._at_once is None:
            return [tensor.data_ptr() for tensor in tensors] == self._values
        return bool(self._at_once(tensors, self._values, self._places))

    def moved(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the places of those that lie elsewhere."""
        return [place for place, (one, then) in enumerate(zip(tensors, self._values, strict=True)) if one.data_ptr() != then]
