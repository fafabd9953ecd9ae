"""Copies of a graph, as kernels of the library: what lies elsewhere in memory gets plain strides.

They stand where ``aten.clone`` would, and like that they may be a region's last op, which a CUDA graph leaves to the copy that
hands results out. Two kinds are known to gain: rows cut out of wider ones, and permuted dims (the patches of pictures). ATen's
kernel walks both element by element: on an H200 it takes 474 µs for 4,096 rows of 50,257 bfloat16 elements, 33 and 53 µs for the
patches of 64 pictures and their transposed result (19 MB each), which memory would move in 195 and 9.
"""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path

import torch

from fusion_advisor.fuse.rewrite import fused_call
from fusion_advisor.library.build import backend as backend_named
from fusion_advisor.library.copies import permuted_copy, rows_copy
from fusion_advisor.library.nvrtc import has_cuda_core
from fusion_advisor.library.program import Program
from fusion_advisor.library.source import Header, KernelBuildFailed, Launcher
from fusion_advisor.library.tuning import best_tuning
from fusion_advisor.records import TensorMeta
from fusion_advisor.timing.measure import compare_alone

_ROWS = Header(
    title="rows_copy",
    summary="rows cut out of wider ones, contiguous",
    origin="generated for the result of a padded GEMM",
)
_PERMUTED = Header(
    title="permuted_copy",
    summary="permuted dims, contiguous",
    origin="generated for what a GEMM over patches reads and gives",
)


class PlainCopy:
    """A function of a tensor that returns it with plain strides.

    Args:
        name: of the kernel.
        layout: of the tensor.
        launch: of a Program of :mod:`~fusion_advisor.library.copies`, bound to it.

    Raises:
        LayoutChanged: (when called) the tensor has another layout.
    """

    def __init__(self, name: str, layout: TensorMeta, launch: Launcher) -> None:
        self.__name__ = self.__qualname__ = name
        plain = TensorMeta(shape=layout.shape, stride=_plain(layout.shape), dtype=layout.dtype, device=layout.device)
        self._call = fused_call(name, launch, [layout], [plain])

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy."""
        return self._call(tensor)


def copy_for(layout: TensorMeta) -> PlainCopy | None:
    """Return the kernel for a tensor on a CUDA device; None on others, or where no kernel is known to be faster than ATen's."""
    if layout.device != "cuda":
        return None
    backends = ("cuda", "triton") if has_cuda_core() else ("triton",)
    if is_rows(layout):
        return build(layout, backends[0])
    return fastest(layout, backends) if is_permuted(layout) else None


@functools.cache
def fastest(layout: TensorMeta, backends: tuple[str, ...]) -> PlainCopy | None:
    """Return the fastest kernel for permuted dims; None where ATen's copy is as fast.

    Once per process for a layout: every set of rewrites that is tried asks for it.

    Args:
        layout: one for which :func:`is_permuted` holds, on a CUDA device.
        backends: to try.
    """
    source = torch.empty_strided(layout.shape, layout.stride, dtype=getattr(torch, layout.dtype), device=layout.device).zero_()
    found: PlainCopy | None = None
    least_ns = 0
    for backend in backends:
        copy = build(layout, backend)
        if copy is None:
            continue
        original, ours = compare_alone(
            lambda: source.clone(memory_format=torch.contiguous_format),
            lambda copy=copy: copy(source),  # type: ignore[misc]
            on_cuda=source.is_cuda,
        )
        if ours.ci_high_ns < (least_ns or original.ci_low_ns):
            found, least_ns = copy, ours.median_ns
    return found


@functools.cache
def build(layout: TensorMeta, backend: str) -> PlainCopy | None:
    """Tune, render and build the kernel; None where it does not compile, and the original op serves.

    Args:
        layout: one for which :func:`is_rows` or :func:`is_permuted` holds.
        backend: ``cuda``, ``triton`` or ``cpp``.
    """
    program, header = _program(layout)
    maker = backend_named(backend)
    tuned = best_tuning(program, None, backend, layout.device, header=header)
    with tempfile.TemporaryDirectory(prefix="fusion-advisor-") as folder:
        try:
            rendered = maker.render(program, header, tuning=tuned.tuning, fast_math=False)
            launch = maker.build(rendered, Path(folder) / f"{rendered.entry}{rendered.suffix}").bind(program)
        except KernelBuildFailed:
            return None
    return PlainCopy(header.title, layout, launch)


def _program(layout: TensorMeta) -> tuple[Program, Header]:
    if is_rows(layout):
        *outer, cols = layout.shape
        return rows_copy(math.prod(outer), cols, layout.stride[-2], layout.dtype), _ROWS
    return permuted_copy(layout.shape, layout.stride, layout.dtype), _PERMUTED


def is_rows(layout: TensorMeta) -> bool:
    """Whether all rows have one distance, which is more than their length."""
    shape, stride = layout.shape, layout.stride
    if len(shape) < 2 or 0 in shape or stride[-1] != 1 or stride[-2] <= shape[-1]:
        return False
    return all(stride[dim] == stride[dim + 1] * shape[dim + 1] for dim in range(len(shape) - 2))


def is_permuted(layout: TensorMeta) -> bool:
    """Whether the dims, in another order than theirs, are plain: every element of a block of memory, once."""
    dims = [dim for dim, size in enumerate(layout.shape) if size != 1]
    order = sorted(dims, key=lambda dim: -layout.stride[dim])
    if 0 in layout.shape or order == dims:
        return False
    in_memory = _plain(tuple(layout.shape[dim] for dim in order))
    return all(layout.stride[dim] == stride for dim, stride in zip(order, in_memory, strict=True))


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
