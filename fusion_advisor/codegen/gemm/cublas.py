"""The same problem through torch's own ops: cuBLAS, and what a call of ours falls back to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fusion_advisor.codegen.common.interface import Launcher
from fusion_advisor.codegen.gemm.problem import GemvProblem

if TYPE_CHECKING:
    import torch


def torch_launcher(
    problem: GemvProblem,
    *,
    norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    gate: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> Launcher:
    """Return a launcher of torch's ops, with as much of the epilogue in the GEMM as ``addmm`` takes.

    It takes what a kernel takes: contiguous tensors of the problem's sizes, whatever their shapes.

    Args:
        problem: at its sizes.
        norm: of x ``(m, k)`` and the norm's weight ``(k)``; torch's own by default.
        gate: writes ``silu(gate) * up`` of the packed halves ``(m, 2 n)`` into its second argument ``(m, n)``; likewise.
    """
    import torch
    from torch.nn import functional

    names = [name for name, _ in problem.operands]

    def torch_norm(x: torch.Tensor, norm_weight: torch.Tensor) -> torch.Tensor:
        if not problem.norm_offset:
            return functional.rms_norm(x, (problem.k,), norm_weight, problem.eps)
        return functional.rms_norm(x.float(), (problem.k,), norm_weight.float() + problem.norm_offset, problem.eps).to(x.dtype)

    def torch_gate(both: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(functional.silu(both[:, : problem.n]), both[:, problem.n :], out=out)

    normed, gated = norm or torch_norm, gate or torch_gate

    def launch(*tensors: torch.Tensor) -> None:
        given = dict(zip(names, tensors, strict=True))
        x, out = given["x"].view(problem.m, problem.k), given["out"].view(problem.m, problem.n)
        weight = given["weight"].view(problem.weight_rows, problem.k).t()
        if problem.has_norm:
            x = normed(x, given["norm_weight"])
        bias, residual = given.get("bias"), given.get("residual")
        bias = None if bias is None else bias.view(problem.weight_rows)
        residual = None if residual is None else residual.view(problem.m, problem.n)
        if problem.is_gated:
            both = torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
            gated(both, out)
        elif bias is not None:
            torch.addmm(bias, x, weight, out=out)
        elif residual is not None:
            torch.addmm(residual, x, weight, out=out)
            return
        else:
            torch.mm(x, weight, out=out)
        if residual is not None:
            out.add_(residual)

    return launch
