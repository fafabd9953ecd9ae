"""Whole-model numerics: the fused model's outputs and eager's own, against a higher-precision copy of the original."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusion_advisor.fuse.verify import check_model
from fusion_advisor.records import ModelCheck
from fusion_advisor.workload.device import memory_bytes
from fusion_advisor.workload.load import LoadedWorkload

_HEADROOM = 1.5
"""A copy is made only where this much more than its parameters is free: activations of a wider dtype need room too."""


def check_whole_model(loaded: LoadedWorkload, eager: Callable[[], Any], fused: Callable[[], Any]) -> ModelCheck:
    """Run all three and compare.

    Args:
        loaded: the original model and its inputs; the copy is made from it and thrown away.
        eager: the original call.
        fused: the fused call.
    """
    ours = named_tensors(fused())
    theirs = named_tensors(eager())
    oracle, name = _oracle(loaded, {tensor.dtype for _, tensor in theirs if tensor.is_floating_point()})
    if oracle is not None and [tensor.shape for _, tensor in oracle] != [tensor.shape for _, tensor in theirs]:
        oracle, name = None, "eager"  # a model that reads the bits of its floats has other shapes in another dtype
    return check_model(_judged(ours), _judged(theirs), _judged(theirs if oracle is None else oracle), name)


def _judged(outputs: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """What is compared: complex numbers as pairs; integers only where a model returns nothing else, and then exactly.

    Beside floats, integers are mostly what was chosen by comparing them, and a tie may fall either way.
    """
    pairs = [(name, torch.view_as_real(tensor) if tensor.is_complex() else tensor) for name, tensor in outputs]
    if any(tensor.is_floating_point() for _, tensor in pairs):
        return pairs
    return [(name, tensor.to(torch.float64)) for name, tensor in pairs]


def named_tensors(output: Any) -> list[tuple[str, torch.Tensor]]:
    """Flatten a model's output into (name, tensor)."""
    leaves, _ = pytree.tree_flatten_with_path(output)
    return [(pytree.keystr(path).strip("[]'.\"") or "output", leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]


def _oracle(loaded: LoadedWorkload, dtypes: Iterable[torch.dtype]) -> tuple[list[tuple[str, torch.Tensor]] | None, str]:
    wide = torch.float32 if set(dtypes) & {torch.float16, torch.bfloat16} else torch.float64
    device = torch.device(loaded.record.device)
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    free, _ = memory_bytes(device)
    if parameters * torch.finfo(wide).bits / 8 * _HEADROOM > free:
        return None, "eager"
    model = copy.deepcopy(loaded.model).to(wide)
    args, kwargs = pytree.tree_map(
        lambda leaf: leaf.to(wide) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf,
        (loaded.args, loaded.kwargs),
    )
    try:
        outputs = named_tensors(model(*args, **kwargs))
    except RuntimeError:  # a dtype that the model's own code names does not follow the copy
        return None, "eager"
    finally:
        del model
    return outputs, f"{str(wide).removeprefix('torch.')} copy"
