"""Compiling a kernel without its GPU: Triton keeps the machine code on disk, where a process that binds the kernel finds it.

The road is that of a launch, so that the key under which Triton keeps the code is the launch's own in every version of it.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_advisor.codegen.common.horizontal_fusion import calls_of
from fusion_advisor.codegen.common.interface import Rendered, environment
from fusion_advisor.codegen.split.choose import split_program
from fusion_advisor.codegen.split.several import rendered_parts
from fusion_advisor.codegen.triton.backend import load_source
from fusion_advisor.codegen.triton.digest import digest_compiler
from fusion_advisor.codegen.triton.direct_launch import compile_options, warmed
from fusion_advisor.codegen.triton.launch import launch_of
from fusion_advisor.ir.program import Program

_COMPILER = ("torch", "triton.compiler", "triton.compiler.code_generator")
_USED_BY_SOME = ("triton.language.extra.libdevice", "triton.experimental.gluon._runtime")
"""What versions of Triton import when they compile."""


@dataclass(frozen=True, slots=True)
class TargetOnly:
    """What Triton asks of a driver ahead of a compilation.

    Attributes:
        arch: compute capability, such as 90.
    """

    arch: int

    def get_current_target(self) -> Any:
        """Return what is compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """Return a number under which Triton keeps kernels in this process."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return a number that nothing uses.

        Args:
            device: any.
        """
        del device
        return 0


def load_compiler() -> None:
    """Do what the first compilation of a process does, so that processes forked from this one need not.

    A kernel took 1.5 s in a process that had compiled before and 7.5 s in one that had not: torch's import was 5.4 of them, the
    digest of Triton itself 1.1 (two cores of an EPYC, torch 2.11, Triton 3.6). Sixteen processes did so at a time.

    Nothing is compiled here: a compiler may leave a thread, which a fork does not copy.
    """
    for name in _COMPILER:
        importlib.import_module(name)
    for name in _USED_BY_SOME:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for skeleton in ("straight", "looped"):
        environment().get_template(f"triton/{skeleton}.py.jinja")
    digest_compiler()


def build_driver() -> None:
    """Leave in Triton's cache the C code by which it talks to CUDA, compiled: a machine's first launch takes a second for it."""
    from triton.backends.nvidia import driver

    driver.CudaUtils()


def compile_ahead(program: Program, rendered: Rendered, arch: int) -> None:
    """Leave the machine code that binding a Program takes in Triton's cache on disk.

    This process can launch no kernel of Triton afterwards: its driver has no device.

    Args:
        program: a Program with the layout key that was rendered.
        rendered: the kernel.
        arch: compute capability, such as 90.

    Raises:
        KernelBuildFailed: Triton refuses it.
    """
    from triton.runtime import driver

    driver.set_active(TargetOnly(arch))
    if rendered.parts:
        for own, one in rendered_parts(program, rendered, split_program):
            compile_ahead(own, one, arch)
        return
    calls = calls_of(program, flatten_rows=False)
    if all(call.plan.is_empty for call in calls):
        return
    shape, integers = launch_of(calls, rendered)
    dtypes = [operand.dtype for operand in program.operands]
    options = compile_options(shape.num_warps, asserts=rendered.has_asserts, is_exact=program.is_exact)
    scalars = (*(value for _, value in integers), *shape.constants.values())
    with tempfile.TemporaryDirectory() as folder:
        kernel = getattr(load_source(rendered, Path(folder) / f"{rendered.entry}.py"), rendered.entry)
        compiled = warmed(kernel, dtypes, scalars, shape.programs, options, entry=rendered.entry, target=f"sm_{arch}")
    _build_launcher(compiled)


def _build_launcher(compiled: Any) -> None:
    """Leave the C code that launches a kernel in Triton's cache as well, compiled, where this version of Triton writes some.

    Triton 3.6 does, for each signature, and has gcc compile it when the kernel is bound: 4 of 20 s of a Swin's trials on an H200.
    """
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(compiled.src, compiled.metadata)
