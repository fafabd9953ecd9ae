"""Memsets of a recorded CUDA graph as kernels, for a graph of kernels alone is launched in one go.

An exported package for a GPU has a copy of this file. cuDNN's attention clears a counter of 4 bytes ahead of its kernel, cuBLAS'
GEMMs that split their sums some more, by memsets. In a CUDA graph that is a node of another kind: fifty of them between a hundred
kernels take 55 µs more to launch, and 1 µs each on the device (H200, driver 13.0). The driver is called by cuda-bindings, which
torch's CUDA builds bring since 2.10; where it is missing, memsets stay.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

ENTRY = "memset_words"
PTX = b"""\
.version 6.0
.target sm_50
.address_size 64
.visible .entry memset_words(.param .u64 to, .param .u32 word, .param .u64 count)
{
    .reg .pred %p;
    .reg .b32 %r<5>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [to];
    ld.param.u32 %r1, [word];
    ld.param.u64 %rd2, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    cvt.u64.u32 %rd3, %r4;
    mad.wide.u32 %rd3, %r2, %r3, %rd3;
    setp.ge.u64 %p, %rd3, %rd2;
    @%p bra DONE;
    cvta.to.global.u64 %rd4, %rd1;
    shl.b64 %rd5, %rd3, 2;
    add.s64 %rd4, %rd4, %rd5;
    st.global.u32 [%rd4], %r1;
DONE:
    ret;
}
"""
"""Each thread writes one word. The driver compiles it for any GPU."""
_EDGES_SINCE = 12030
"""Version of the driver that has the calls which tell a graph's edges with their data."""
_WORD_BYTES = 4
_THREADS = 128
_MOST_WORDS = 1 << 20
"""Of one memset: above, the copy engines' way of doing it is as good as a kernel's."""


def replace(graph: Any, function: Callable[[], Any] | None = None) -> int:
    """Put kernels in place of memsets of whole words; return how many.

    All of them stay without cuda-bindings, and with drivers from before CUDA 12.3.

    Args:
        graph: a ``torch.cuda.CUDAGraph`` that was captured with ``keep_graph=True`` and is not instantiated yet.
        function: returns the kernel's ``CUfunction``; asked where there is a memset. It stays loaded as long as the graph lives.

    Raises:
        RuntimeError: the driver refuses; the graph is of no use then.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        return 0
    if done(driver.cuDriverGetVersion()) < _EDGES_SINCE:
        return 0
    captured = driver.CUgraph(graph.raw_cuda_graph())
    memset = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
    found = [node for node in listed(driver.cuGraphGetNodes, captured) if done(driver.cuGraphNodeGetType(node)) == memset]
    if not found:
        return 0
    kernel = (function or _function)()
    return sum(_replace(captured, node, kernel) for node in found)


def _function() -> Any:
    """Return the kernel's function in the current context."""
    from cuda.bindings import driver

    return done(driver.cuKernelGetFunction(_kernel()))


@functools.cache
def _kernel() -> Any:
    """Load the kernel, for as long as the process lives: graphs refer to it."""
    from cuda.bindings import driver

    library = done(driver.cuLibraryLoadData(PTX + b"\0", [], [], 0, [], [], 0))
    return done(driver.cuLibraryGetKernel(library, ENTRY.encode()))


def _replace(graph: Any, node: Any, function: Any) -> bool:
    from cuda.bindings import driver

    what = done(driver.cuGraphMemsetNodeGetParams(node))
    words, rest = divmod(int(what.width) * int(what.elementSize), _WORD_BYTES)
    is_plain = int(what.height) == 1 and not rest and int(what.dst) % _WORD_BYTES == 0 and 0 < words <= _MOST_WORDS
    if not is_plain:
        return False
    # The value has as many bytes as an element; a word repeats it.
    element = int(what.value) & ((1 << 8 * int(what.elementSize)) - 1)
    word = sum(element << 8 * place for place in range(0, _WORD_BYTES, int(what.elementSize)))
    launch = driver.CUDA_KERNEL_NODE_PARAMS()
    launch.func = function
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = -(-words // _THREADS), 1, 1
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = _THREADS, 1, 1
    types = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_ulonglong)
    launch.kernelParams = ((int(what.dst), word, words), types)
    before = listed(of_edges("cuGraphNodeGetDependencies"), node)
    after = listed(of_edges("cuGraphNodeGetDependentNodes"), node)
    kernel = done(driver.cuGraphAddKernelNode(graph, before, len(before), launch))
    done(of_edges("cuGraphAddDependencies")(graph, [kernel] * len(after), after, None, len(after)))
    done(driver.cuGraphDestroyNode(node))
    return True


def of_edges(name: str) -> Any:
    """A function that takes and gives the data of edges: of its second version until CUDA 13, which has no other."""
    from cuda.bindings import driver

    return getattr(driver, f"{name}_v2", None) or getattr(driver, name)


def listed(function: Any, of: Any) -> list[Any]:
    """Ask a function that fills a list first for its length, then for the list."""
    *_, count = _all(function(of, 0))
    return list(_all(function(of, count))[0])[:count] if count else []


def done(answer: tuple[Any, ...]) -> Any:
    """Return the first result of a call of the driver, None where it has none.

    Raises:
        RuntimeError: it failed.
    """
    results = _all(answer)
    return results[0] if results else None


def _all(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *results = answer
    if error.value:
        raise RuntimeError(f"a memset of the graph cannot be replaced: {error.name}")
    return tuple(results)
