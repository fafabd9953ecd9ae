"""The C++ backend's descriptor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion_advisor.codegen.common.descriptor import Backend

if TYPE_CHECKING:
    from fusion_advisor.codegen.common.interface import KernelMaker


class Cpp(Backend):
    """C++ with OpenMP, on CPUs."""

    name = "cpp"
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
