"""A copy of a graph, as a kernel of the library: rows cut out of wider ones, made contiguous.

It stands where ``aten.clone`` would, and like that it may be a region's last op, which a CUDA graph leaves to the copy that hands
results out.
"""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path

import torch

from fusion_advisor.fuse.rewrite import fused_call
from fusion_advisor.library.build import backend as backend_named
from fusion_advisor.library.copies import rows_copy
from fusion_advisor.library.nvrtc import has_cuda_core
from fusion_advisor.library.source import Header, KernelBuildFailed, Launcher
from fusion_advisor.library.tuning import best_tuning
from fusion_advisor.records import TensorMeta

_HEADER = Header(
    title="rows_copy",
    summary="rows cut out of wider ones, contiguous",
    origin="generated for the result of a padded GEMM",
)


class RowsCopy:
    """A function of a tensor that returns it with plain strides.

    Args:
        layout: of the tensor: rows of one stride, their elements side by side.
        launch: of :func:`~fusion_advisor.library.copies.rows_copy`, bound to it.

    Raises:
        LayoutChanged: (when called) the tensor has another layout.
    """

    def __init__(self, layout: TensorMeta, launch: Launcher) -> None:
        self.__name__ = self.__qualname__ = _HEADER.title
        plain = TensorMeta(shape=layout.shape, stride=_plain(layout.shape), dtype=layout.dtype, device=layout.device)
        self._call = fused_call(_HEADER.title, launch, [layout], [plain])

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy."""
        return self._call(tensor)


def copy_for(layout: TensorMeta) -> RowsCopy | None:
    """Return the kernel for a tensor on a CUDA device; None on others, or where the rows are not what it copies."""
    if layout.device != "cuda" or not is_rows(layout):
        return None
    return build(layout, "cuda" if has_cuda_core() else "triton")


@functools.cache
def build(layout: TensorMeta, backend: str) -> RowsCopy | None:
    """Tune, render and build the kernel; None where it does not compile, and the original op serves.

    Once per process for a layout: every set of rewrites that is tried asks for it.

    Args:
        layout: one for which :func:`is_rows` holds.
        backend: ``cuda``, ``triton`` or ``cpp``.
    """
    *outer, cols = layout.shape
    program = rows_copy(math.prod(outer), cols, layout.stride[-2], layout.dtype)
    maker = backend_named(backend)
    tuned = best_tuning(program, None, backend, layout.device, header=_HEADER)
    with tempfile.TemporaryDirectory(prefix="fusion-advisor-") as folder:
        try:
            rendered = maker.render(program, _HEADER, tuning=tuned.tuning, fast_math=False)
            launch = maker.build(rendered, Path(folder) / f"{rendered.entry}{rendered.suffix}").bind(program)
        except KernelBuildFailed:
            return None
    return RowsCopy(layout, launch)


def is_rows(layout: TensorMeta) -> bool:
    """Whether all rows have one distance, which is more than their length."""
    shape, stride = layout.shape, layout.stride
    if len(shape) < 2 or 0 in shape or stride[-1] != 1 or stride[-2] <= shape[-1]:
        return False
    return all(stride[dim] == stride[dim + 1] * shape[dim + 1] for dim in range(len(shape) - 2))


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
