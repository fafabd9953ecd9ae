"""Memsets of a recorded graph as kernels, for a graph of kernels alone is launched in one go.

A hundred kernels in a row are launched in 3 µs, fifty with as many memsets between them in 58 µs, and each memset takes the
device 1 µs; with kernels in their place that is 3 µs and next to nothing (H200, driver 13.0). What is done to the graph is in
:mod:`fusion_advisor.export.copied.memset_nodes`, of which exported packages have a copy. Here the kernel is compiled by NVRTC.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from fusion_advisor.codegen.common.interface import KernelBuildFailed, Rendered
from fusion_advisor.codegen.cuda.nvrtc import compile_loaded, has_cuda_core
from fusion_advisor.export.copied.memset_nodes import ENTRY, done, replace

if TYPE_CHECKING:
    import torch

_SOURCE = """\
// A memset node of a CUDA graph as a kernel: `count` words of 32 bits.
extern "C" __global__ void memset_words(unsigned int *to, unsigned int word, unsigned long long count) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long at = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += stride) {
        to[at] = word;
    }
}
"""


class Memsets:
    """Replaces the memsets of recorded graphs on one device, the one that is current when the first is replaced.

    The kernel that stands in for them stays loaded as long as this lives: keep it with the graphs.
    """

    def __init__(self) -> None:
        self._kernel: Any = None
        self._is_on = has_cuda_core()

    def replace(self, graph: torch.cuda.CUDAGraph) -> int:
        """Put kernels in place of memsets of whole words; returns how many.

        All of them stay without cuda-core, where its compiler fails, and with drivers from before CUDA 12.3.

        Args:
            graph: captured with ``keep_graph=True`` and not instantiated yet.

        Raises:
            RuntimeError: the driver refuses; the graph is of no use then.
        """
        if not self._is_on:
            return 0
        try:
            return replace(graph, self._function)
        except KernelBuildFailed as failure:  # ahead of the first change
            self._is_on = False
            warnings.warn(f"memsets stay in CUDA graphs, which are launched more slowly for it: {failure}", stacklevel=2)
            return 0

    def _function(self) -> Any:
        from cuda.bindings import driver

        if self._kernel is None:
            self._kernel = compile_loaded(Rendered(backend="cuda", entry=ENTRY, source=_SOURCE, suffix=".cu"), {})
        return done(driver.cuKernelGetFunction(self._kernel.handle))
