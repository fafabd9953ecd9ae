"""Backends by name; each is imported when it is asked for, so that a machine without CUDA never loads what it cannot use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion_advisor.codegen.common.interface import Backend
from fusion_advisor.errors import UsageError

if TYPE_CHECKING:
    from fusion_advisor.codegen.gemm.cuda import GemvCuda
    from fusion_advisor.codegen.gemm.triton import GemvTriton

BACKENDS = ("triton", "cuda", "cpp")


def backend(name: str) -> Backend:
    """Return the backend ``triton``, ``cuda`` or ``cpp``.

    Raises:
        UsageError: there is no backend of that name.
    """
    if name == "triton":
        from fusion_advisor.codegen.triton.backend import TritonBackend

        return TritonBackend()
    if name == "cuda":
        from fusion_advisor.codegen.cuda.backend import CudaBackend

        return CudaBackend()
    if name == "cpp":
        from fusion_advisor.codegen.cpp.backend import CppBackend

        return CppBackend()
    raise UsageError(detail=f"there is no backend `{name}`", help=f"one of: {', '.join(BACKENDS)}")


def gemv_backend(name: str) -> GemvCuda | GemvTriton:
    """Return the backend ``triton`` or ``cuda`` for linear layers.

    Raises:
        UsageError: there is none of that name.
    """
    if name == "triton":
        from fusion_advisor.codegen.gemm.triton import GemvTriton

        return GemvTriton()
    if name == "cuda":
        from fusion_advisor.codegen.gemm.cuda import GemvCuda

        return GemvCuda()
    raise UsageError(detail=f"there is no GEMV in `{name}`", help="one of: triton, cuda")
