"""CUDA graphs: work recorded once and replayed, so that what is timed is the device and not Python's launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class CannotRecord(Exception):
    """A step that a CUDA graph cannot hold (a sync, an allocation it may not make)."""


def recorded(call: Callable[[], Any], *, pool: Any = None, repeats: int = 1) -> Callable[[], None]:
    """Record ``call`` into a CUDA graph and return its replay.

    Args:
        call: warmed up here on a side stream before it is recorded.
        pool: memory pool shared with other graphs that are never replayed at the same time.
        repeats: how often the work is recorded into one graph.

    Raises:
        CannotRecord: with the driver's sentence.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.no_grad(), torch.cuda.graph(graph, pool=pool):
            for _ in range(repeats):
                call()
    except RuntimeError as error:
        raise CannotRecord(str(error).strip().splitlines()[0]) from error
    torch.cuda.synchronize()
    return graph.replay
