"""The Triton backend's descriptor."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from fusion_advisor.codegen.common.descriptor import INTERPRET, RUN, Backend, Search

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fusion_advisor.codegen.common.interface import KernelMaker, Rendered
    from fusion_advisor.codegen.common.site import Layout
    from fusion_advisor.ir.program import Program


class Triton(Backend):
    """Triton, on NVIDIA GPUs; its interpreter runs kernels on a CPU."""

    name = "triton"
    title = "Triton"
    suffix = ".py"
    lexer = "python"
    device_kinds = ("cuda",)
    tile_parameters = ("block_cols", "block_rows", "num_warps")
    interpreter_variable = "TRITON_INTERPRET"

    def why_missing(self) -> str:
        """Say that Triton is not installed."""
        return "" if importlib.util.find_spec("triton") else "Triton is not installed"

    def without_device(self) -> str:
        """Interpret kernels, in this process where Triton was asked to before its import."""
        return self.why_missing() or (RUN if os.environ.get(self.interpreter_variable) == "1" else INTERPRET)

    def maker(self) -> KernelMaker:
        """Return what renders and builds Triton kernels."""
        from fusion_advisor.codegen.triton.backend import TritonBackend

        return TritonBackend()

    def compile_for(self, program: Program, rendered: Rendered, arch: int) -> bytes:
        """Compile to a cubin."""
        from fusion_advisor.codegen.triton.backend import compile_for

        return compile_for(program, rendered, arch)

    def compile_ahead(self, program: Program, rendered: Rendered, arch: int) -> None:
        """Compile under the key of a launch, which a compilation without a device does not have."""
        from fusion_advisor.codegen.triton.ahead import compile_ahead

        compile_ahead(program, rendered, arch)

    def file_text(self, rendered: Rendered, program: Program, layouts: Sequence[Layout | None], *, fast_math: bool) -> str:
        """Return a file that needs torch and Triton."""
        from fusion_advisor.codegen.triton.launcher import with_launcher

        return with_launcher(rendered, program, layouts=layouts, fast_math=fast_math)

    def search(self, program: Program, limits: object | None) -> Search:
        """Return block sizes and warps; they depend on the program alone."""
        del limits
        from fusion_advisor.codegen.triton.candidates import search

        return search(program)
