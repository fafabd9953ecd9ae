"""All-reduce, residual add and a norm (RMSNorm or LayerNorm) in one launch on each GPU of a host.

Every rank has one buffer that all ranks map. A rank writes its rows into the buffers of the others, raises a flag there, waits
for the others' flags and reads its own buffer. All ranks add in the order of the ranks and in float32, so their bits are equal.

No call can read what is not there yet, or overwrite what is still read:

- A flag is stored with release and loaded with acquire, both for all GPUs, after a barrier of the block. So a block that sees the
  flag of a round sees the rows of that round.
- Rounds are numbered through all calls by a counter in the GPU's memory. A flag only grows, a block waits until it is at least
  the round's number, and nothing is ever set back. A CUDA graph replays this as it is, because the host passes no number.
- Round n writes to part n mod 4 of a buffer, and a block's place in a part depends on the call's shape. A block writes round n
  after it has waited for round n - 2 at least, within a call and over its end: a kernel ends when each of its blocks has seen all
  flags. Another rank raised its flag of round n - 2 once it had read round n - 3. So at most the parts of the rounds n - 2 and
  n - 1 are still read, and neither is written.
- All blocks of a grid fit on the GPU at once, so none waits for a block that has no place.

Two conditions remain with the caller: all ranks make the same calls in the same order, and calls of one buffer run on one stream.
A rank that waits longer than the timeout ends its kernel with a trap, which the host sees as an error of CUDA.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from fusion_advisor.codegen.common.interface import Launcher, Rendered, environment
from fusion_advisor.codegen.cuda.backend import CudaLaunch, launcher_of
from fusion_advisor.codegen.cuda.nvrtc import compile_loaded
from fusion_advisor.collectives.launch_shape import (
    DATA_AT,
    MOST_RANKS,
    RING_BYTES,
    LaunchShape,
    Norm,
    Way,
    launch_shape,
    why_unserved,
)

TIMEOUT_S = 25.0
"""A rank that is later than this is lost; NCCL is given as long."""

_NORMS: tuple[Norm, ...] = ("rms", "rms-once", "layer")
"""By their numbers in the kernel."""


def render(norm: Norm = "rms") -> Rendered:
    """Return the kernel's source; sizes come as macros.

    Args:
        norm: what follows the sum; the kernel is named after it.
    """
    template = environment().get_template("cuda/all_reduce_norm.cu.jinja")
    digest = hashlib.sha256(template.render(entry="").encode()).hexdigest()[:6]
    entry = f"fa_all_reduce_add_{'layernorm' if norm == 'layer' else 'rmsnorm'}_{digest}"
    return Rendered(backend="cuda", entry=entry, source=template.render(entry=entry), suffix=".cu")


def macros_of(
    shape: LaunchShape, dtype: torch.dtype, way: Way, rank: int, world_size: int, *, norm: Norm = "rms", has_offset: bool = False
) -> dict[str, int]:
    """Return what the kernel is compiled with.

    Args:
        shape: of the launch.
        dtype: bfloat16 or float16.
        way: to sum.
        rank: of this process.
        world_size: number of ranks.
        norm: what follows the sum.
        has_offset: whether a bias of the linear is added to the sum.
    """
    return {
        "RANK": rank, "WORLD": world_size, "THREADS": shape.threads, "BLOCKS_PER_SM": shape.blocks_per_sm, "PACKS": shape.packs,
        "TWO_SHOT": int(way == "two-shot"), "HALF_IS_FP16": int(dtype == torch.float16), "DATA_AT": DATA_AT,
        "RING_BYTES": RING_BYTES, "NORM": _NORMS.index(norm), "HAS_OFFSET": int(has_offset),
    }  # fmt: skip


class AllReduceNorm:
    """Launches the kernel on one rank.

    Args:
        addresses: of every rank's buffer as this rank maps it, in the order of the ranks; each is of ``BUFFER_BYTES`` bytes and
            was zero before the first call.
        rank: of this process.
        multiprocessors: of the smallest GPU.
        timeout_s: a rank that waits longer for another one stops.
        compiled: compiles a source with macros; NVRTC for the current device by default.
    """

    def __init__(
        self,
        addresses: tuple[int, ...],
        rank: int,
        *,
        multiprocessors: int,
        timeout_s: float = TIMEOUT_S,
        compiled: Callable[[Rendered, dict[str, int]], Any] = compile_loaded,
    ) -> None:
        self._addresses = addresses
        self._rank = rank
        self._multiprocessors = multiprocessors
        self._timeout_ns = round(timeout_s * 1e9)
        self._compiled = compiled
        self._kernels: dict[tuple[int, ...], Any] = {}

    def launcher(
        self, rows: int, cols: int, dtype: torch.dtype, *, eps: float, way: Way, norm: Norm = "rms", has_offset: bool = False
    ) -> Launcher:
        """Return what launches the kernel for one size, on the current stream.

        It is called with ``x``, ``residual``, ``weight``, then a LayerNorm's ``shift`` and a linear's ``offset`` where there are
        such, ``total`` and ``out``: contiguous, of the dtype, ``rows`` by ``cols`` apart from the ``cols`` of weight, shift and
        offset. ``total`` may be ``residual``.

        Args:
            rows: of the call, at least one.
            cols: numbers in a row.
            dtype: bfloat16 or float16.
            eps: of the norm.
            way: to sum.
            norm: what follows the sum.
            has_offset: whether a bias of the linear, equal on all ranks, is added to the sum.

        Raises:
            ValueError: rows that the kernel does not compute.
            KernelBuildFailed: NVRTC refuses it.
        """
        import numpy  # cuda-core's own dependency; it converts numpy's numbers faster than those of ctypes

        config, shape = self._config(rows, cols, dtype)
        padded = [*self._addresses, *[0] * (MOST_RANKS - len(self._addresses))]
        integers = (rows, cols // 8, shape.rows_per_round, shape.rounds)
        scalars = [
            *map(numpy.uint64, padded), *map(numpy.int32, integers), numpy.float32(eps), numpy.uint64(self._timeout_ns),
        ]  # fmt: skip
        macros = macros_of(shape, dtype, way, self._rank, len(self._addresses), norm=norm, has_offset=has_offset)
        first = CudaLaunch(kernel=self._kernel(norm, macros), config=config, scalars=scalars, text=f"{way} {shape}")
        return launcher_of(first, _refuse_unaligned, 16)

    def _config(self, rows: int, cols: int, dtype: torch.dtype) -> tuple[Any, LaunchShape]:
        from cuda.core import LaunchConfig

        reason = why_unserved(cols, dtype.itemsize, len(self._addresses))
        if reason or rows < 1:
            raise ValueError(reason or f"{rows} rows")
        shape = launch_shape(rows, cols, len(self._addresses), self._multiprocessors)
        return LaunchConfig(grid=(shape.blocks, 1, 1), block=(shape.threads, 1, 1)), shape

    def _kernel(self, norm: Norm, macros: dict[str, int]) -> Any:
        key = tuple(macros.values())
        if key not in self._kernels:
            self._kernels[key] = self._compiled(render(norm), macros)
        return self._kernels[key]


def _refuse_unaligned() -> NoReturn:
    raise ValueError("the kernel reads 16 bytes at once, and a tensor begins between two such places")
