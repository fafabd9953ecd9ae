"""CUDA C++ kernels of linear layers as functions of a kernel repository, for weights as the run laid them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusion_advisor.codegen.gemm.problem import FORMS
from fusion_advisor.errors import PlanMismatch
from fusion_advisor.export.kernel_ops import KernelOp, KernelOps
from fusion_advisor.export.linear_ops import why_not, with_linears
from fusion_advisor.fuse.decide.session import BuiltLinear
from fusion_advisor.fuse.live.restore_plan import Restored, put_together
from fusion_advisor.fuse.live.saved_plan import SavedPlan
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.workload.load import LoadedWorkload


def linear_functions(
    loaded: LoadedWorkload, saved: SavedPlan, chains: Sequence[KernelOp], together: Callable[..., Restored] = put_together
) -> tuple[tuple[KernelOp, ...], tuple[str, ...]]:
    """Return the ops of a plan's CUDA C++ kernels of linear layers, and a sentence where they cannot be made.

    The model is captured once more, with the whole plan: these kernels stand on rewrites that its source does not have. A gated
    layer's weight holds the gate's rows, then the rows of what it gates. Layers that the run merged have no such tensor in the
    model, so no layer is made for ``kernelize``.

    Args:
        loaded: the model and the call of the run.
        saved: the plan, with the rewrites that the kernels stand on.
        chains: other ops of the repository, whose names are taken.
        together: puts a plan's kernels on the graphs that it changed.
    """
    if not any(kernel.backend == "cuda" for row in saved.linears for kernel in row.rendered):
        return (), ()
    try:
        restored = together(loaded, saved, PhaseClock(Progress()))
    except PlanMismatch as mismatch:  # the chains' own layout fits: they are exported without these
        return (), (f"no kernel of a linear layer: {mismatch}",)
    restored.live.written.restore()
    taken = KernelOps(ops=tuple(chains), by_call={})
    return with_linears(taken, restored.bench, in_cuda(restored.linears)).ops[len(chains) :], ()


def in_cuda(linears: Sequence[BuiltLinear]) -> list[BuiltLinear]:
    """Return the linear layers that have a CUDA C++ kernel of their own.

    Args:
        linears: as they were built.
    """
    return [one for one in linears if one.source is not None and one.source.config.form in FORMS["cuda"] and not why_not(one)]
