"""Linear layers on few rows in Triton; sizes and blocks are constexpr arguments."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from fusion_advisor.codegen.common.header_comment import comment
from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Launcher, Rendered, environment
from fusion_advisor.codegen.gemm.launcher import triton_file
from fusion_advisor.codegen.gemm.problem import (
    GemvConfig,
    GemvProblem,
    default_config,
    entry_of,
    heading_lines,
    refusal,
    token_tiles,
)
from fusion_advisor.codegen.triton.backend import compile_source, has_cuda, load_source
from fusion_advisor.codegen.triton.direct_launch import TritonLauncher, compile_options


class GemvTriton:
    """Renders and builds the Triton kernels."""

    name: ClassVar[str] = "triton"

    def render(self, problem: GemvProblem, header: Header, *, config: GemvConfig | None = None) -> Rendered:
        """Print the source of one configuration; the backend's own choice by default.

        Raises:
            KernelBuildFailed: the configuration does not serve the problem.
        """
        config = config or default_config(problem, (self.name,))
        entry = entry_of(problem, header, config)
        cause = refusal(problem, config.form) or ("" if config.form in ("triton_fma", "triton_dot") else "the choice is cuBLAS")
        if cause:
            raise KernelBuildFailed(kernel=entry, target="triton", cause=cause)
        constants = list(_constants(problem, config))
        source = environment().get_template("triton/gemv.py.jinja").render(
            heading=comment(heading_lines(problem, header, config)), helpers=[], entry=entry, problem=problem, form=config.form,
            signature=[
                ", ".join(name for name, _ in problem.operands),
                ", ".join(f"{name}: tl.constexpr" for name in constants),
            ],
            halves=["value", "up"] if problem.is_gated else ["value"], eps=repr(problem.eps), exp="tl.exp", fast_math=False,
            bits=32, offset=f" + {problem.norm_offset!r}" if problem.norm_offset else "",
        )  # fmt: skip
        rendered = Rendered(backend=self.name, entry=entry, source=source, suffix=".py")
        options = compile_options(config.warps)
        return replace(
            rendered, text=triton_file(rendered, problem, config, constants=_constants(problem, config), options=options)
        )

    def build(self, rendered: Rendered, path: Path) -> GemvTritonKernel:
        """Write the source to ``path`` and import it; machine code is made when a problem is bound.

        Raises:
            KernelBuildFailed: the file cannot be imported.
        """
        return GemvTritonKernel(rendered, path)

    def compile_for(self, problem: GemvProblem, rendered: Rendered, arch: int, *, config: GemvConfig | None = None) -> bytes:
        """Compile a kernel for a GPU that need not be here; see :func:`compile_for`."""
        return compile_for(problem, rendered, arch, config=config)


class GemvTritonKernel:
    """An imported kernel.

    Attributes:
        build_ns: what importing and compiling took so far.
        tuning: the launch parameters.
    """

    def __init__(self, rendered: Rendered, path: Path) -> None:
        started = time.perf_counter_ns()
        self._rendered = rendered
        self._kernel: Any = getattr(load_source(rendered, path), rendered.entry)
        self.build_ns = time.perf_counter_ns() - started
        self.tuning = ""

    def bind(self, problem: GemvProblem, config: GemvConfig | None = None) -> Launcher:
        """Compile for the current device and fix the grid; the arguments are those of the render.

        Raises:
            KernelBuildFailed: Triton refuses the kernel.
        """
        config = config or default_config(problem, ("triton",))
        self.tuning = config.text
        constants, programs = _constants(problem, config), -(-problem.n // config.rows)
        if not hasattr(self._kernel, "warmup") or not has_cuda():
            return lambda *tensors: self._kernel[(programs,)](
                # The interpreter's dot takes the bits of bfloat16 for integers.
                *(t.float() if problem.dtype == "bfloat16" else t for t in tensors[:-1]),
                tensors[-1],
                **constants,
                num_warps=config.warps,
            )
        started = time.perf_counter_ns()
        dtypes = [problem.dtype] * len(problem.operands)
        launcher = TritonLauncher(
            self._kernel, dtypes, tuple(constants.values()), programs, compile_options(config.warps), self._rendered.entry
        )
        self.build_ns += time.perf_counter_ns() - started
        return launcher


def _constants(problem: GemvProblem, config: GemvConfig) -> dict[str, int]:
    found = {"M": problem.m, "N": problem.n, "K": problem.k}
    if config.form == "triton_dot":
        found["BLOCK_M"] = max(16, 1 << (16 * token_tiles(problem) - 1).bit_length())
    return {**found, "BLOCK_N": config.rows, "BLOCK_K": config.block_k, "STAGES": config.stages}


def compile_for(problem: GemvProblem, rendered: Rendered, arch: int, *, config: GemvConfig | None = None) -> bytes:
    """Compile a kernel for a GPU that need not be here; see :func:`fusion_advisor.codegen.triton.backend.compile_for`."""
    config = config or default_config(problem, ("triton",))
    dtypes = [problem.dtype] * len(problem.operands)
    compiled = compile_source(rendered, arch, dtypes, [], _constants(problem, config), compile_options(config.warps))
    return bytes(compiled["cubin"])
