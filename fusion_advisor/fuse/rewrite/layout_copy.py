"""Copies that change a tensor's layout, as kernels of the library: rows cut out of wider rows, and permuted dims.

A copy stands where ``aten.clone`` would. If it is a region's last op, a CUDA graph leaves it to the copy that hands results
out. CUDA C++ is faster where whole packs stay contiguous or runs are shorter than a tile; Triton is faster where it can turn
whole tiles. Figures: ``docs/measurements/layout_copy.md``.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.autotune.tune import best_tuning
from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Launcher
from fusion_advisor.codegen.cuda.nvrtc import has_cuda_core
from fusion_advisor.codegen.layout_copy import faster_language, permuted_copy, rows_copy
from fusion_advisor.codegen.registry import backend as backend_named
from fusion_advisor.codegen.standalone import with_launcher
from fusion_advisor.fuse.rewrite.graph_rewriter import fused_call
from fusion_advisor.fuse.rewrite.launch_count import tally_of
from fusion_advisor.ir.program import Program
from fusion_advisor.records import RenderedKernel, TensorMeta
from fusion_advisor.runtime.torch_internals import symbolic_sizes
from fusion_advisor.verify.check_chain import layout_of

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
        name: stands in the graph's code.
        layout: of the tensor.
        launch: of a Program of :mod:`~fusion_advisor.codegen.layout_copy`, bound to it.
        kernel: that it launches; its path is a file's name.
        made_for: id of the rewrite that asks for the copy.

    Attributes:
        kernel: see above.
        made_for: see above.
        layout: see above.
        plain: of the result.
        tally: counts its launches.

    Raises:
        LayoutChanged: (when called) the tensor has another layout.
    """

    def __init__(self, name: str, layout: TensorMeta, launch: Launcher, kernel: RenderedKernel, *, made_for: str = "") -> None:
        self.__name__ = self.__qualname__ = name
        self.kernel = kernel
        self.made_for = made_for
        self.layout, self._launch = layout, launch
        self.plain = TensorMeta(shape=layout.shape, stride=_plain(layout.shape), dtype=layout.dtype, device=layout.device)
        self._call = fused_call(name, launch, [layout], [self.plain])
        self.tally = tally_of(self._call)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy."""
        return self._call(tensor)

    def again(self, made_for: str) -> PlainCopy:
        """Return the same copy for a rewrite, with a tally of its own: each place in a graph counts for itself."""
        return PlainCopy(self.__name__, self.layout, self._launch, self.kernel, made_for=made_for)


def put_copy(graph: Graph, source: Node, made_for: str) -> Node:
    """Add a copy of a node's value to plain strides: a kernel of the library, or ``aten.clone`` where none is faster.

    Args:
        graph: where its insertion point is.
        source: with its value in ``meta``; the copy gets nothing but its own value there.
        made_for: id of the rewrite that asks for it.
    """
    value = source.meta["val"]
    # A kernel of ours is made for one layout. Where sizes are open it would have to be made in the middle of a call.
    copy = None if symbolic_sizes.is_symbolic(value) else copy_for(layout_of(value))
    if copy is None:
        made = graph.call_function(torch.ops.aten.clone.default, (source,), {"memory_format": torch.contiguous_format})
    else:
        made = graph.call_function(copy.again(made_for), (source,))
    made.meta = {"val": value.new_empty(value.shape)}
    return made


def copy_for(layout: TensorMeta) -> PlainCopy | None:
    """Return the kernel for a tensor on a CUDA device; None on others, or where no kernel is known to be faster than ATen's."""
    backend = backend_for(layout, has_cuda=has_cuda_core()) if layout.device == "cuda" else None
    return None if backend is None else build(layout, backend)


def backend_for(layout: TensorMeta, *, has_cuda: bool) -> str | None:
    """Return the language for a layout (see above); None where ATen's copy serves.

    Args:
        layout: any.
        has_cuda: whether CUDA C++ can be launched.
    """
    if not is_rows(layout) and not is_permuted(layout):
        return None
    return faster_language(copy_program(layout)[0], is_of_rows=is_rows(layout), has_cuda=has_cuda)


@functools.cache
def build(layout: TensorMeta, backend: str) -> PlainCopy | None:
    """Tune, render and build the kernel; None where it does not compile, and the original op serves.

    Once per process for a layout: every set of rewrites that is tried asks for it.

    Args:
        layout: one for which :func:`is_rows` or :func:`is_permuted` holds.
        backend: name of the backend.
    """
    program, header = copy_program(layout)
    maker = backend_named(backend)
    tuned = best_tuning(program, (), backend, layout.device, header=header)
    with tempfile.TemporaryDirectory(prefix="fusion-advisor-") as folder:
        try:
            rendered = with_launcher(maker.render(program, header, tuning=tuned.tuning, fast_math=False), program)
            built = maker.build(rendered, Path(folder) / f"{rendered.entry}{rendered.suffix}")
            launch = built.bind(program)
        except KernelBuildFailed:
            return None
    kernel = RenderedKernel(
        name=rendered.entry,
        backend=backend,
        path=f"{header.title}_{rendered.entry.rpartition('_')[2]}{rendered.suffix}",
        source=rendered.file_text,
        origin=header.origin,
        tuning=f"{built.tuning} ({tuned.text})" if built.tuning else tuned.text,
        parameters=tuned.tuning,
    )
    return PlainCopy(header.title, layout, launch, kernel)


def kernels_of(modules: Iterable[GraphModule], made_for: str) -> tuple[RenderedKernel, ...]:
    """Return the kernels of the copies in some graphs that a rewrite asked for, each once."""
    targets = [node.target for module in modules for node in module.graph.nodes]
    copies = [target for target in targets if isinstance(target, PlainCopy) and target.made_for == made_for]
    return tuple({copy.kernel.path: copy.kernel for copy in copies}.values())


def copy_program(layout: TensorMeta) -> tuple[Program, Header]:
    """Return what a copy's kernel is rendered from.

    Args:
        layout: one for which :func:`is_rows` or :func:`is_permuted` holds.
    """
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
