"""A gated linear layer on many rows in CUDA C++, for Hopper: ``silu(x @ gate.T) * (x @ up.T)`` in one kernel.

The GEMM's result has twice the columns of what is kept of it. cuBLAS writes it to memory, and the next kernel reads it again:
44 MB for 512 tokens of Llama-3.1-8B, 10 of 168 µs on an H200, where this kernel takes 159. It multiplies as fast as cuBLAS does
without the gate (158 µs; 183 to its 189 for Qwen2.5-7B's layer, whose tiles are cut to fill the multiprocessors).

Persistent blocks, one for each multiprocessor: a warp copies tiles of x and of both halves of the weight into a ring in shared
memory (the bulk tensor copy engine, which swizzles them and counts the bytes on an mbarrier), two warpgroups multiply 64 rows
each with ``wgmma``. The halves lie one below the other in shared memory, so that one instruction multiplies both and a thread's
registers hold a gate and what it gates. Two blocks of a cluster share the weight's tiles: each copies a half to both.

Source: the layout follows CUTLASS's warp-specialised persistent kernels and P. Shankhdhar's "Outperforming cuBLAS on H100".
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusion_advisor.codegen.common.header_comment import comment
from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Launcher, Rendered, environment
from fusion_advisor.codegen.cuda.nvrtc import allow_shared_memory
from fusion_advisor.codegen.gemm.cublas import torch_launcher
from fusion_advisor.codegen.gemm.launcher import cuda_file
from fusion_advisor.codegen.gemm.problem import (
    TILE_COLUMNS,
    TILE_TOKENS,
    GemvConfig,
    GemvProblem,
    blocks_of,
    entry_of,
    heading_lines,
    stage_bytes,
)

THREADS = 384
"""Of a block: a warpgroup that copies tiles and two that multiply."""
_MOST_BOUND = 1024
"""Sets of addresses whose tensor maps are kept; a step in a CUDA graph has one, others as many as the allocator hands out."""
_MAPS = (
    {"name": "x", "rows": "M", "cols": "K", "tile": "TOKENS, DEPTH", "is_swizzled": "true"},
    {"name": "weight", "rows": "2 * N", "cols": "K", "tile": "ROWS, DEPTH", "is_swizzled": "true"},
    {"name": "out", "rows": "M", "cols": "N", "tile": "TOKENS / 2, ROWS", "is_swizzled": "false"},
)
"""Tensor maps in the words of the kernel's file, see :class:`_Arguments`."""
_PTX_TYPES = {"float16": "f16", "bfloat16": "bf16"}


def render(problem: GemvProblem, header: Header, config: GemvConfig) -> Rendered:
    """Print the source of one configuration, for a problem that it serves."""
    entry = entry_of(problem, header, config)
    macros = [
        ("rows of x", "M", problem.m),
        ("columns of the result", "N", problem.n),
        ("columns of x and of the weight", "K", problem.k),
        ("rows of the gate's weight for a block, and as many of the other half's; a multiple of 16", "ROWS", config.rows),
        ("tiles under way together", "STAGES", config.stages),
        ("blocks that share the weight's tiles: 1 or 2", "CLUSTER", blocks_of(problem)),
    ]
    source = environment().get_template("cuda/gemm_gated.cu.jinja").render(
        heading=comment(heading_lines(problem, header, config)), macros=macros, helpers=["exp2_16bit", "sigmoid_16bit"],
        entry=entry,
        signature=[f"const __grid_constant__ TensorMap {name}" for name, _ in problem.operands], bounds=f"{THREADS}, 1",
        is_clustered=True, fast_math=False, bits=32, has_pairs=False, rows=config.rows, ptx=_PTX_TYPES[problem.dtype],
        registers=_lines(range(config.rows), 16, '"{}"', "%{}"), operands=_lines(range(config.rows), 6, "{}", '"+f"(sums[{}])'),
    )  # fmt: skip
    rendered = Rendered(backend="cuda", entry=entry, source=source, suffix=".cu", is_for_one_arch=True)
    launch = {"tensor_maps": _MAPS, "threads": THREADS, "shared_bytes": shared_bytes_of(config)}
    return replace(rendered, text=cuda_file(rendered, problem, config, tensor_maps=launch))


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixMap:
    """A row-major matrix and the tiles that are copied out of it or into it; sizes in elements."""

    rows: int
    cols: int
    tile_rows: int
    tile_cols: int
    is_swizzled: bool


def matrix_maps(problem: GemvProblem, config: GemvConfig) -> tuple[MatrixMap, ...]:
    """Return what the kernel's tensor maps describe: x, the weight, the result.

    Args:
        problem: at its sizes.
        config: as rendered.
    """
    sizes = (
        (problem.m, problem.k, TILE_TOKENS, TILE_COLUMNS, True),
        (problem.weight_rows, problem.k, config.rows, TILE_COLUMNS, True),
        (problem.m, problem.n, TILE_TOKENS // 2, config.rows, False),
    )
    return tuple(
        MatrixMap(rows=rows, cols=cols, tile_rows=tile_rows, tile_cols=tile_cols, is_swizzled=is_swizzled)
        for rows, cols, tile_rows, tile_cols, is_swizzled in sizes
    )


def tiles_of(problem: GemvProblem, config: GemvConfig) -> int:
    """Return how many clusters have work: each computes one tile at a time.

    Args:
        problem: at its sizes.
        config: as rendered.
    """
    return -(-problem.m // (TILE_TOKENS * blocks_of(problem))) * -(-problem.n // config.rows)


def shared_bytes_of(config: GemvConfig) -> int:
    """Return the shared memory of a block: the tiles under way, and a tile of results.

    Args:
        config: as rendered.
    """
    return config.stages * stage_bytes(config) + TILE_TOKENS * config.rows * 2


def _lines(numbers: range, width: int, line: str, item: str) -> list[str]:
    """Write a register's name for each number, some on a line."""
    text = [item.format(number) + (", " if number + 1 < len(numbers) else "") for number in numbers]
    return [line.format("".join(text[start : start + width])).rstrip() for start in range(0, len(text), width)]


def launcher(kernel: Any, problem: GemvProblem, config: GemvConfig) -> Launcher:
    """Return a launcher on the current stream of the device that the tensors are on.

    Tensor maps hold addresses: they are made at the first call with these tensors' and kept. A call with a tensor that is not
    16-byte aligned goes to torch's ops.

    Args:
        kernel: cuda-core's, of :func:`render`'s source for the same arguments.
        problem: at its sizes.
        config: as rendered.
    """
    import torch
    from cuda.bindings import driver

    fallback = torch_launcher(problem)
    shared_bytes = shared_bytes_of(config)
    functions: dict[int, tuple[Any, int]] = {}
    bound: dict[tuple[int, ...], _Arguments] = {}
    current_device = torch.cuda.current_device

    def start(*tensors: torch.Tensor) -> None:
        device = tensors[0].get_device()
        if device != current_device():
            with torch.cuda.device(device):
                start(*tensors)
            return
        places = tuple(tensor.data_ptr() for tensor in tensors)
        arguments = bound.get(places)
        if arguments is None:
            if any(place % 16 for place in places):
                fallback(*tensors)
                return
            if len(bound) >= _MOST_BOUND:
                bound.clear()
            arguments = bound[places] = _Arguments(problem, config, places)
        if device not in functions:
            allow_shared_memory(kernel, shared_bytes, device)
            found = _done(driver.cuKernelGetFunction(kernel.handle))
            functions[device] = found, _grid(problem, config, torch.cuda.get_device_properties(device).multi_processor_count)
        function, grid = functions[device]
        stream = torch.cuda.current_stream(device).cuda_stream
        _launched(driver.cuLaunchKernel(function, grid, 1, 1, THREADS, 1, 1, shared_bytes, stream, arguments.address, 0))

    return start


class _Arguments:
    """Tensor maps of one set of addresses, as a launch takes them; they live as long as this."""

    def __init__(self, problem: GemvProblem, config: GemvConfig, places: Sequence[int]) -> None:
        described = zip(places, matrix_maps(problem, config), strict=True)
        self._maps = tuple(_tensor_map(place, matrix, problem.dtype) for place, matrix in described)
        self._pointers = (ctypes.c_void_p * len(self._maps))(*(one.getPtr() for one in self._maps))
        self.address = ctypes.addressof(self._pointers)


def _tensor_map(place: int, matrix: MatrixMap, dtype: str) -> Any:
    """Describe a row-major matrix and the tiles that are copied; what lies outside of it reads as 0 and is not written."""
    from cuda.bindings import driver

    types, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    return _done(
        driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16 if dtype == "float16" else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2, place, [wide(matrix.cols), wide(matrix.rows)], [wide(matrix.cols * 2)],
            [narrow(matrix.tile_cols), narrow(matrix.tile_rows)], [narrow(1), narrow(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_128B if matrix.is_swizzled else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )  # fmt: skip


def _grid(problem: GemvProblem, config: GemvConfig, multiprocessors: int) -> int:
    blocks = blocks_of(problem)
    return blocks * min(tiles_of(problem, config), max(1, multiprocessors // blocks))


def _done(answer: tuple[Any, ...]) -> Any:
    error, *results = answer
    if error.value:
        raise KernelBuildFailed(kernel="gate_up", target="cuda", cause=f"the driver refuses what a launch needs: {error.name}")
    return results[0]


def _launched(answer: tuple[Any, ...]) -> None:
    error = answer[0]
    if error.value:
        raise RuntimeError(f"a gated linear layer could not be launched: {error.name}")
