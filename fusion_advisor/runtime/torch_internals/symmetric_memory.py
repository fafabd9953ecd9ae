"""Symmetric memory: a buffer of each rank that all ranks of a host map."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBuffer:
    """One rank's end.

    Attributes:
        own: this rank's buffer, uint8, on its GPU.
        addresses: of every rank's buffer as this rank maps it, in the order of the ranks.
        handle: keeps the others' memory mapped.
    """

    own: torch.Tensor
    addresses: tuple[int, ...]
    handle: Any


def shared_buffer(size_bytes: int, device: torch.device, group_name: str) -> SharedBuffer:
    """Make a buffer of zeros that all ranks of a group map. Every rank of the group calls this at the same place.

    NVLink multicast is not used: a machine may lack what it takes (the fabric manager), and this kernel writes to each rank.

    Args:
        size_bytes: equal on all ranks.
        device: of this rank.
        group_name: of the process group.

    Raises:
        RuntimeError: the GPUs do not reach each other's memory.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    own = symmetric.empty(size_bytes, dtype=torch.uint8, device=device)
    own.zero_()
    torch.cuda.synchronize(device)  # a rank hands out its address below, and others may write there at once
    join: Any = symmetric.rendezvous  # a name of a group is a type of its own in some releases
    handle = join(own, group_name)
    return SharedBuffer(own=own, addresses=tuple(map(int, handle.buffer_ptrs)), handle=handle)
