"""Kernel files that can be taken away: each ends in a launch, a reference and a main program that checks and times it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from fusion_advisor.codegen.common.interface import Rendered
from fusion_advisor.codegen.common.site import Layout
from fusion_advisor.errors import UsageError
from fusion_advisor.ir.program import Program

_ARCH = 90
"""The compute capability that a CUDA file names where no device is here."""


class _TensorLayout(Protocol):
    """A tensor's layout as captures record it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...


def with_launcher(
    rendered: Rendered, program: Program, *, tensors: Sequence[_TensorLayout | None] = (), fast_math: bool = False
) -> Rendered:
    """Return a kernel whose file runs by itself.

    Args:
        rendered: the kernel; what is compiled of it stays as it is.
        program: of its site.
        tensors: layout of each operand at the site, where it is known.
        fast_math: whether the kernel approximates.

    Raises:
        UsageError: the kernel is for no known backend.
    """
    if rendered.backend == "triton":
        from fusion_advisor.codegen.triton import launcher as triton

        layouts = [None if t is None else Layout(shape=tuple(t.shape), strides=tuple(t.stride)) for t in tensors]
        return replace(rendered, text=triton.with_launcher(rendered, program, layouts=layouts, fast_math=fast_math))
    if rendered.backend == "cpp":
        from fusion_advisor.codegen.cpp import launcher as cpp

        return replace(rendered, text=cpp.with_launcher(rendered, program, fast_math=fast_math))
    if rendered.backend == "cuda":
        import torch

        from fusion_advisor.codegen.cuda import launcher as cuda
        from fusion_advisor.codegen.cuda.nvrtc import device_shared_memory, has_cuda_core
        from fusion_advisor.codegen.cuda.shared_memory import shared_memory_of

        is_here = torch.cuda.is_available()
        major, minor = torch.cuda.get_device_capability() if is_here else divmod(_ARCH, 10)
        arch = 10 * major + minor
        shared = device_shared_memory() if is_here and has_cuda_core() else shared_memory_of(arch)
        return replace(rendered, text=cuda.with_launcher(rendered, program, shared=shared, arch=arch, fast_math=fast_math))
    raise UsageError(detail=f"there is no backend `{rendered.backend}`", help="one of: triton, cuda, cpp")
