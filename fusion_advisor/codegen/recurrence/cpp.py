"""Recurrences in C++: blocks of rows are shared out between threads, and each is walked through all steps.

A block's part of the state is small enough for the first-level cache (32 rows of 16 numbers are 2 kB), so memory sees the inputs
and the rows alone.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fusion_advisor.codegen.common.header_comment import comment
from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Launcher, Rendered, entry_name, environment
from fusion_advisor.codegen.cpp.arguments import Layout
from fusion_advisor.codegen.cpp.backend import CppBackend, CppKernel, compile_flags, filled, includes_of
from fusion_advisor.codegen.cpp.body import Kernel
from fusion_advisor.codegen.recurrence.notes import notes_of
from fusion_advisor.ir.recurrence import Recurrence

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CppRecurrence:
    """A compiled kernel, loaded into the process."""

    kernel: CppKernel

    @property
    def build_ns(self) -> int:
        """Nanoseconds spent compiling."""
        return self.kernel.build_ns

    @property
    def tuning(self) -> str:
        """Nothing is tuned."""
        return ""

    def bind(self, recurrence: Recurrence) -> Launcher:
        """Fix sizes and strides; the launcher takes the operands' tensors in order, the state among them.

        Raises:
            KernelBuildFailed: the recurrence has another layout than the one that was rendered.
        """
        import torch

        program = recurrence.program
        if not self.kernel.entry.endswith(entry_name(program, "recurrence").rpartition("_")[2]):
            raise KernelBuildFailed(kernel=self.kernel.entry, target="cpp", cause="it was rendered for another layout")
        function = getattr(self.kernel.handle, self.kernel.entry)
        fixed = [ctypes.c_int64(parameter.value) for parameter in Layout(program).parameters]
        function.argtypes = [ctypes.c_void_p] * len(program.operands) + [ctypes.c_int64] * len(fixed) + [ctypes.c_int]
        function.restype = None
        data_ptr, threads, is_empty = torch.Tensor.data_ptr, torch.get_num_threads(), 0 in program.dims[:-1]

        def launch(*tensors: torch.Tensor) -> None:
            if not is_empty:
                function(*map(data_ptr, tensors), *fixed, threads)

        return launch


class CppRecurrences:
    """Renders and builds recurrences for the CPU."""

    name: ClassVar[str] = "cpp"

    def render(self, recurrence: Recurrence, header: Header) -> Rendered:
        """Print a recurrence as readable C++.

        Raises:
            KernelBuildFailed: a step walks its columns more than once.
        """
        program = recurrence.program
        entry = entry_name(program, header.title)
        kernel = Kernel(program)
        if sum(section.loop is not None for section in kernel.sections) > 1:
            raise KernelBuildFailed(kernel=entry, target="cpp", cause="a step would walk the state's columns more than once")
        flags = compile_flags()
        source = (
            environment()
            .get_template("cpp/recurrence.cpp.jinja")
            .render(
                kernel=kernel,
                total=" * ".join(kernel.layout.sizes),
                grain=kernel.grain,
                compares_indices=kernel.compares_indices,
                is_reduced=program.is_reduced,
                header=comment([*notes_of(recurrence, header), f"Build: c++ {' '.join(flags)}"]),
                includes=includes_of(kernel),
                prelude=kernel.prelude.names,
                signature=filled(f'extern "C" void {entry}(', kernel.layout.signature),
            )
        )
        return Rendered(backend=self.name, entry=entry, source=source, suffix=".cpp", flags=flags)

    def build(self, rendered: Rendered, path: Path) -> CppRecurrence:
        """Write the source to ``path`` and compile it.

        Raises:
            KernelBuildFailed: there is no compiler, or it refused the source.
        """
        return CppRecurrence(kernel=CppBackend().build(rendered, path))
