"""The C++ backend's descriptor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion_advisor.codegen.common.descriptor import Backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fusion_advisor.codegen.common.interface import KernelMaker, Rendered
    from fusion_advisor.codegen.common.site import Layout
    from fusion_advisor.ir.program import Program


class Cpp(Backend):
    """C++ with OpenMP, on CPUs."""

    name = "cpp"
    other_names = ("c++", "cxx")
    title = "C++"
    suffix = ".cpp"
    lexer = "cpp"
    device_kinds = ("cpu",)

    def why_missing(self) -> str:
        """Say that there is no compiler."""
        from fusion_advisor.codegen.cpp.backend import find_compiler

        return "" if find_compiler() else "no C++ compiler found; install g++ or clang++, or set CXX"

    def maker(self) -> KernelMaker:
        """Return what renders and builds C++ kernels."""
        from fusion_advisor.codegen.cpp.backend import CppBackend

        return CppBackend()

    def file_text(self, rendered: Rendered, program: Program, layouts: Sequence[Layout | None], *, fast_math: bool) -> str:
        """Return a file that needs a C++ compiler."""
        del layouts
        from fusion_advisor.codegen.cpp.launcher import with_launcher

        return with_launcher(rendered, program, fast_math=fast_math)
