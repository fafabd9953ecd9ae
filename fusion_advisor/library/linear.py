"""A manifest with a ``[gemv]`` table as the linear layer that it declares."""

from __future__ import annotations

from fusion_advisor.codegen.gemm.problem import GemvProblem
from fusion_advisor.library.spec import Case, KernelSpec


def problem_of(spec: KernelSpec, variant: str, case: Case, dtype: str) -> GemvProblem:
    """The problem that a manifest with a ``[gemv]`` table declares, at one of its sizes.

    The manifest's sizes are ``M``, ``N`` and ``K``; its inputs have the names of :class:`GemvProblem`'s operands, in their order.
    """
    assert spec.gemv is not None, spec.name
    sizes, names = dict(case.sizes), {tensor.name for tensor in spec.inputs}
    return GemvProblem(
        m=sizes["M"],
        n=sizes["N"],
        k=sizes["K"],
        dtype=dtype,
        has_norm="norm_weight" in names,
        eps=dict(spec.constants).get("eps", 0.0),
        norm_offset=dict(spec.gemv.norm_offsets).get(variant, 0.0),
        has_bias="bias" in names,
        is_gated=spec.gemv.is_gated,
        has_residual="residual" in names,
    )
