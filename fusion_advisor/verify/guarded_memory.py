"""Outputs inside a larger piece of memory, whose surroundings show whether a kernel wrote outside of its output."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_advisor.verify.subgraph_oracle import extent

GUARD_BYTES = 512
"""On both sides of a checked output: more than the widest vector store, and a multiple of every alignment."""


def guarded(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, poison: float) -> torch.Tensor:
    """Return an output inside a larger piece of memory, filled with what no kernel writes.

    Args:
        shape: of the output.
        stride: likewise.
        dtype: likewise.
        device: where it lies.
        poison: fills what is to be written.
    """
    reach = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    margin = GUARD_BYTES // dtype.itemsize
    memory = torch.full((reach + 2 * margin,), _guard_of(dtype), dtype=dtype, device=device)
    return memory.as_strided(shape, stride, margin).fill_(poison)


def guard_is_damaged(output: torch.Tensor) -> bool:
    """Whether something was written around or between the elements of an output of :func:`guarded`."""
    margin = GUARD_BYTES // output.element_size()
    size = output.untyped_storage().nbytes() // output.element_size()
    if output.storage_offset() != margin or size != extent(output) + 2 * margin:
        return False  # not one of ours: the kernel's caller made it
    memory = output.as_strided((size,), (1,), 0)
    if output.numel() == extent(output):  # nothing lies between its elements
        return not bool((torch.cat((memory[:margin], memory[-margin:])) == _guard_of(output.dtype)).all())
    outside = torch.ones(size, dtype=torch.bool, device=output.device)
    outside.as_strided(output.shape, output.stride(), margin).fill_(False)
    return not bool((memory[outside] == _guard_of(output.dtype)).all())


def _guard_of(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    return -7.125 if dtype.is_floating_point else torch.iinfo(dtype).max - 1
