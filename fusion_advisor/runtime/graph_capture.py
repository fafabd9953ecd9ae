"""Records work into a CUDA graph; the caller's stream and the collector of cycles stay as they were, also where it fails."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def recording_into(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """Record what runs inside into a graph.

    ``torch.cuda.graph`` alone (2.11, 2.13) keeps its own stream current where the capture fails: everything that the process
    launches later goes there, and a graph that was recorded for the caller's stream is not replayed any more. And a collection of
    cycles inside may free another graph, which CUDA does not permit while a stream is captured.

    Args:
        graph: empty.
        options: of ``torch.cuda.graph``.

    Raises:
        RuntimeError: something in it cannot be recorded.
    """
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, **options):
            yield
    finally:
        if was_collecting:
            gc.enable()
