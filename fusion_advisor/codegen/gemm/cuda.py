"""Linear layers in CUDA C++, on few rows and, with a gate, on many: a kernel for each shape, compiled in tens of ms by NVRTC.

Sizes are constants of the source: a model has a handful of them, and the compiler drops every bound that they make superfluous.
"""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from fusion_advisor.codegen.common.header_comment import comment
from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Launcher, Rendered, environment
from fusion_advisor.codegen.cuda.backend import CudaLaunch, launcher_of
from fusion_advisor.codegen.cuda.nvrtc import compile_cubin, compile_loaded, target_of
from fusion_advisor.codegen.gemm import hopper_gated
from fusion_advisor.codegen.gemm.cublas import torch_launcher
from fusion_advisor.codegen.gemm.launcher import cuda_file, cuda_type
from fusion_advisor.codegen.gemm.problem import (
    FORMS,
    GemvConfig,
    GemvProblem,
    default_config,
    entry_of,
    heading_lines,
    refusal,
    token_tiles,
)
from fusion_advisor.ir.program import ITEM_BYTES
from fusion_advisor.records.serialize import write_atomic


class GemvCuda:
    """Renders and builds the CUDA kernels."""

    name: ClassVar[str] = "cuda"

    def render(self, problem: GemvProblem, header: Header, *, config: GemvConfig | None = None) -> Rendered:
        """Print the source of one configuration; the backend's own choice by default.

        Raises:
            KernelBuildFailed: the configuration does not serve the problem.
        """
        config = config or default_config(problem, (self.name,))
        entry = entry_of(problem, header, config)
        cause = refusal(problem, config.form) or ("" if config.form in FORMS[self.name] else "the choice is cuBLAS")
        if cause:
            raise KernelBuildFailed(kernel=entry, target="cuda", cause=cause)
        if config.form == "cuda_wgmma":
            return hopper_gated.render(problem, header, config)
        is_mma = config.form == "cuda_mma"
        kind = {"float16": "half", "bfloat16": "bfloat16"}.get(problem.dtype, "")
        type_name = cuda_type(problem.dtype)
        helpers = [kind, "from_float32", f"from_float32_{kind}"] if kind else []
        helpers += ["pack", "load_pack", "stream_policy", "stream_pack"]
        sigmoid = ("exp2_16bit", "sigmoid_16bit") if kind else ("sigmoid",)
        helpers += ["lanes_sum", *(sigmoid if problem.is_gated else ())]
        if is_mma:
            helpers += [f"mma_{kind}", *(["from_float32_pair"] if problem.has_norm else [])]
        wide = "to_float32" if kind else ""
        loaded = f"{wide}(norm[col])" if wide else "norm[col]"
        macros = [
            ("rows of x", "M", problem.m),
            ("columns of the result", "N", problem.n),
            ("columns of x and of the weight", "K", problem.k),
            ("rows of the weight for a block", "ROWS", config.rows),
            ("warps of a block: they share the columns", "WARPS", config.warps),
            ("loads of a thread from each row that are under way together", "UNROLL", config.unroll),
            ("columns of one load", "VEC", pack_width(problem)),
        ]
        signature = [f"{'' if name == 'out' else 'const '}{type_name}* __restrict__ {name}" for name, _ in problem.operands]
        source = environment().get_template(f"cuda/gemv_{'mma' if is_mma else 'fma'}.cu.jinja").render(
            heading=comment(heading_lines(problem, header, config)), macros=macros, helpers=helpers, entry=entry,
            signature=signature, bounds="WARPS * 32", is_clustered=False, problem=problem, type=type_name, sigmoid=sigmoid[-1],
            wide=wide, narrow=f"from_float32<{type_name}>" if kind else "", has_pairs=False, fast_math=False, bits=32,
            tokens=16 * token_tiles(problem) if is_mma else problem.m, eps=f"{problem.eps!r}f",
            norm_factor=f"({loaded} + {problem.norm_offset!r}f)" if problem.norm_offset else loaded,
        )  # fmt: skip
        rendered = Rendered(backend=self.name, entry=entry, source=source, suffix=".cu")
        return replace(rendered, text=cuda_file(rendered, problem, config))

    def build(self, rendered: Rendered, path: Path) -> GemvCudaKernel:
        """Write the source to ``path`` and compile it for the current device.

        Raises:
            KernelBuildFailed: NVRTC refuses it, or there is no cuda-core.
        """
        write_atomic(path, rendered.file_text)  # a link that lies there is replaced, not followed
        return GemvCudaKernel(rendered)

    def compile_for(self, problem: GemvProblem, rendered: Rendered, arch: int, *, config: GemvConfig | None = None) -> bytes:
        """Compile a kernel for a GPU that need not be here; the problem and its configuration stand in the source."""
        del problem, config
        return compile_for(rendered, arch)


class GemvCudaKernel:
    """A compiled kernel.

    Attributes:
        build_ns: what NVRTC took.
        tuning: the launch parameters.
    """

    def __init__(self, rendered: Rendered) -> None:
        started = time.perf_counter_ns()
        self._rendered = rendered
        self._kernel: Any = compile_loaded(rendered, {})
        self.build_ns = time.perf_counter_ns() - started
        self.tuning = ""

    def bind(self, problem: GemvProblem, config: GemvConfig | None = None) -> Launcher:
        """Fix the grid; the arguments are those of the render.

        A call with a tensor that is not 16-byte aligned goes to torch's ops.
        """
        from cuda.core import LaunchConfig

        config = config or default_config(problem, ("cuda",))
        self.tuning = config.text
        if config.form == "cuda_wgmma":
            return hopper_gated.launcher(self._kernel, problem, config)
        grid, block = launch_shape(problem, config)
        first = CudaLaunch(
            kernel=self._kernel,
            config=LaunchConfig(grid=grid, block=block),
            scalars=[],
            text=config.text,
        )
        return launcher_of(first, functools.cache(lambda: torch_launcher(problem)), ALIGNMENT_BYTES)


ALIGNMENT_BYTES = 16
"""Of the address of every tensor that a kernel is launched on."""


def launch_shape(problem: GemvProblem, config: GemvConfig) -> tuple[int, int]:
    """Return how many blocks a kernel without tensor maps is launched with, and how many threads each has."""
    return -(-problem.n // config.rows), 32 * config.warps


def pack_width(problem: GemvProblem) -> int:
    """Columns of one load: as many as 16 bytes hold and divide a row."""
    width = 16 // ITEM_BYTES[problem.dtype]
    while problem.k % width:
        width //= 2
    return width


def compile_for(rendered: Rendered, arch: int, *, compiler: str = "") -> bytes:
    """Compile a kernel for a GPU that need not be here; see :func:`fusion_advisor.codegen.cuda.nvrtc.compile_cubin`."""
    return compile_cubin(rendered, target_of(rendered, arch), {}, compiler=compiler)
