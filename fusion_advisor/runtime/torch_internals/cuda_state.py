"""CUDA: the current device and stream, the switches by which kernels are chosen, and cuBLAS's workspaces."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch


def current_device_number() -> int:
    """Return the current device's number once CUDA is in use, without the questions whether it is."""
    return int(torch._C._cuda_getDevice())


def current_stream_number(device: int) -> int:
    """Return the driver's handle of a device's current stream, without an object around it."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def _precision(backend: str, op: str) -> Callable[[], Any]:
    return functools.partial(torch._C._get_fp32_precision_getter, backend, op)


_SWITCHES: tuple[Callable[[], Any], ...] = (
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    _precision("generic", "all"),
    _precision("cuda", "matmul"),
    _precision("cuda", "conv"),
    _precision("cuda", "rnn"),
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_deterministic_algorithms,
)


def kernel_switches() -> tuple[Any, ...]:
    """Return all switches by which torch chooses kernels: SDPA's backends, TF32, cuDNN's, determinism.

    The same read through ``torch.backends`` takes 4.0 µs in place of 0.9: each of its attributes is found by code.
    """
    return tuple(map(operator.call, _SWITCHES))


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
