"""Device memory of one way to run a step: what it needs, what it holds between calls, and what one call allocates on top.

The allocator's own peak cannot compare ways that live in one process: it counts what the others hold, and it does not count what
a CUDA graph writes to inside its pool, for nothing is allocated when the graph is replayed. So the parts are measured separately.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusion_advisor.capture.graph.side_effects import arguments

_DEFAULT_POOL = (0, 0)


def needed_bytes(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the bytes of the model's weights and buffers and of the tensors that it is called with, shared storages once."""
    tensors = [*model.parameters(), *model.buffers(), *arguments(args, kwargs).values()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def held_bytes(*, on_cuda: bool) -> int:
    """Return what is allocated now, private pools of CUDA graphs as a whole; 0 on a CPU, where no allocator counts."""
    if not on_cuda:
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return sum(
        int(segment["total_size" if tuple(segment.get("segment_pool_id", _DEFAULT_POOL)) != _DEFAULT_POOL else "allocated_size"])
        for segment in torch.cuda.memory_snapshot()
    )


def transient_bytes(call: Callable[[], Any], *, on_cuda: bool) -> int:
    """Return the most that one call allocates in addition to what is there before it; 0 on a CPU."""
    if not on_cuda:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


def release_cached_memory() -> None:
    """Give what torch's allocator holds for later back to the GPU; nothing happens where none is in use."""
    gc.collect()
    torch.cuda.empty_cache()
