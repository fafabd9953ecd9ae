"""Copies of a model and of what it is called with, in a wider dtype: whole steps are judged by what these return."""

from __future__ import annotations

import copy
from typing import Any

import torch

from fusion_advisor.verify.subgraph_oracle import wide_dtype


def widened_copy(model: torch.nn.Module, wide: torch.dtype) -> torch.nn.Module:
    """Return a copy of a model whose floats and complex numbers are wide; integers stay.

    Args:
        model: any module.
        wide: float32 or float64.

    Raises:
        RuntimeError: it holds a tensor with a history, or there is no memory for the copy.
        TypeError: it holds what cannot be copied, as a lock.
    """
    twin = copy.deepcopy(model)
    twin = twin.double() if wide == torch.float64 else twin.float()
    # Both leave complex numbers alone. ``Module.to`` of a real dtype would drop their imaginary parts.
    for tensor in (*twin.parameters(), *twin.buffers()):
        if tensor.is_complex():
            tensor.data = tensor.data.to(wide_dtype(tensor.dtype, wide))
    return twin


def widened_leaf(leaf: Any, wide: torch.dtype) -> Any:
    """Return a part of a call as the wide model is given it: tensors as copies, a dtype (that of a cache) wide.

    Args:
        leaf: any object.
        wide: float32 or float64.
    """
    if isinstance(leaf, torch.dtype):
        return wide_dtype(leaf, wide)
    return leaf.to(wide_dtype(leaf.dtype, wide), copy=True) if isinstance(leaf, torch.Tensor) else leaf
