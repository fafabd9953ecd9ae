"""Backends of linear layers by name; the one that is tried first stands first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion_advisor.errors import UsageError

if TYPE_CHECKING:
    from fusion_advisor.codegen.gemm.cuda import GemvCuda
    from fusion_advisor.codegen.gemm.triton import GemvTriton

LINEAR_BACKENDS = ("cuda", "triton")
FEW_ROWS_ONLY = ("triton",)
"""Of them, those without a kernel for more rows than ``problem.MOST_ROWS``."""


def gemv_backend(name: str) -> GemvCuda | GemvTriton:
    """Return what renders and builds linear layers in a language.

    Raises:
        UsageError: there is none of that name.
    """
    if name == "triton":
        from fusion_advisor.codegen.gemm.triton import GemvTriton

        return GemvTriton()
    if name == "cuda":
        from fusion_advisor.codegen.gemm.cuda import GemvCuda

        return GemvCuda()
    raise UsageError(detail=f"there is no GEMV in `{name}`", help=f"one of: {', '.join(LINEAR_BACKENDS)}")
