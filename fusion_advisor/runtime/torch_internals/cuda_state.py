"""CUDA: the current device and stream, and cuBLAS's workspaces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def current_device_number() -> int:
    """Return the current device's number once CUDA is in use, without the questions whether it is."""
    return int(torch._C._cuda_getDevice())


def current_stream_number(device: int) -> int:
    """Return the driver's handle of a device's current stream, without an object around it."""
    return int(torch._C._cuda_getCurrentRawStream(device))


@contextlib.contextmanager
def own_gemm_workspace() -> Iterator[None]:
    """Give what is recorded inside a cuBLAS workspace in its own memory pool, which lives as long as its graph does.

    Torch keeps one workspace for each stream and hands it to every GEMM. torch.compile's reduce-overhead mode frees them all, and
    a graph that was recorded with one of those would write to memory that is another tensor's by then, or nobody's. So enter this
    around the capture alone: streams come from a pool of 32, and one that runs a step ahead of the capture, to warm it up, may be
    the one that captures.
    """
    clear = torch._C._cuda_clearCublasWorkspaces if torch.cuda.is_available() else _nothing
    clear()
    try:
        yield
    finally:
        clear()


def _nothing() -> None:
    pass
