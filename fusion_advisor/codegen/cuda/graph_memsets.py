"""Memsets of a recorded graph as kernels, for a graph of kernels alone is launched in one go.

cuDNN's attention clears a counter of 4 bytes ahead of its kernel, cuBLAS' GEMMs that split their sums some more, by memsets. In a
CUDA graph that is a node of another kind. A hundred kernels in a row are launched in 3 µs, fifty with as many memsets between
them in 58 µs, and each memset takes the device 1 µs; with kernels in their place that is 3 µs and next to nothing (H200, driver
13.0).
"""

from __future__ import annotations

import ctypes
import warnings
from typing import TYPE_CHECKING, Any

from fusion_advisor.codegen.common.interface import KernelBuildFailed, Rendered
from fusion_advisor.codegen.cuda.nvrtc import compile_loaded, has_cuda_core

if TYPE_CHECKING:
    import torch

_ENTRY = "memset_words"
_SOURCE = """\
// A memset node of a CUDA graph as a kernel: `count` words of 32 bits.
extern "C" __global__ void memset_words(unsigned int *to, unsigned int word, unsigned long long count) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long at = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += stride) {
        to[at] = word;
    }
}
"""
_EDGES_SINCE = 12030
"""Version of the driver that has the calls which tell a graph's edges with their data."""
_WORD_BYTES = 4
_THREADS = 128
_MOST_WORDS = 1 << 20
"""Of one memset: above, the copy engines' way of doing it is as good as a kernel's."""


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
        from cuda.bindings import driver

        if _done(driver.cuDriverGetVersion()) < _EDGES_SINCE:
            return 0
        captured = driver.CUgraph(graph.raw_cuda_graph())
        memset = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
        found = [node for node in _listed(driver.cuGraphGetNodes, captured) if _done(driver.cuGraphNodeGetType(node)) == memset]
        if found and self._kernel is None:
            try:
                self._kernel = compile_loaded(Rendered(backend="cuda", entry=_ENTRY, source=_SOURCE, suffix=".cu"), {})
            except KernelBuildFailed as failure:
                self._is_on = False
                warnings.warn(f"memsets stay in CUDA graphs, which are launched more slowly for it: {failure}", stacklevel=2)
                return 0
        return sum(self._replace(captured, node) for node in found)

    def _replace(self, graph: Any, node: Any) -> bool:
        from cuda.bindings import driver

        what = _done(driver.cuGraphMemsetNodeGetParams(node))
        words, rest = divmod(int(what.width) * int(what.elementSize), _WORD_BYTES)
        is_plain = int(what.height) == 1 and not rest and int(what.dst) % _WORD_BYTES == 0 and 0 < words <= _MOST_WORDS
        if not is_plain:
            return False
        # The value has as many bytes as an element; a word repeats it.
        element = int(what.value) & ((1 << 8 * int(what.elementSize)) - 1)
        word = sum(element << 8 * place for place in range(0, _WORD_BYTES, int(what.elementSize)))
        launch = driver.CUDA_KERNEL_NODE_PARAMS()
        launch.func = _done(driver.cuKernelGetFunction(self._kernel.handle))
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = -(-words // _THREADS), 1, 1
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = _THREADS, 1, 1
        types = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_ulonglong)
        launch.kernelParams = ((int(what.dst), word, words), types)
        before = _listed(_of_edges("cuGraphNodeGetDependencies"), node)
        after = _listed(_of_edges("cuGraphNodeGetDependentNodes"), node)
        kernel = _done(driver.cuGraphAddKernelNode(graph, before, len(before), launch))
        _done(_of_edges("cuGraphAddDependencies")(graph, [kernel] * len(after), after, None, len(after)))
        _done(driver.cuGraphDestroyNode(node))
        return True


def _of_edges(name: str) -> Any:
    """A function that takes and gives the data of edges: of its second version until CUDA 13, which has no other."""
    from cuda.bindings import driver

    return getattr(driver, f"{name}_v2", None) or getattr(driver, name)


def _listed(function: Any, of: Any) -> list[Any]:
    """Ask a function that fills a list first for its length, then for the list."""
    *_, count = _all(function(of, 0))
    return list(_all(function(of, count))[0])[:count] if count else []


def _done(answer: tuple[Any, ...]) -> Any:
    results = _all(answer)
    return results[0] if results else None


def _all(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *results = answer
    if error.value:
        raise RuntimeError(f"a memset of the graph cannot be replaced: {error.name}")
    return tuple(results)
