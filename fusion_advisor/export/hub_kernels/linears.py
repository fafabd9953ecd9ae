"""CUDA C++ kernels of linear layers as functions of a kernel repository, for weights as the run laid them out."""

from __future__ import annotations

from collections.abc import Sequence

from fusion_advisor.codegen.gemm.problem import FORMS
from fusion_advisor.export.kernel_ops import KernelOp, KernelOps
from fusion_advisor.export.linear_ops import why_not, with_linears
from fusion_advisor.fuse.decide.session import BuiltLinear
from fusion_advisor.fuse.live.restore_plan import put_together
from fusion_advisor.fuse.live.saved_plan import SavedPlan
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.workload.load import LoadedWorkload


def linear_functions(loaded: LoadedWorkload, saved: SavedPlan, chains: Sequence[KernelOp]) -> tuple[KernelOp, ...]:
    """Put a plan together and return the ops of its CUDA C++ kernels of linear layers.

    A gated layer's weight holds the gate's rows, then the rows of what it gates: layers that the run merged have no such tensor
    in the model, so there is no layer that ``kernelize`` could put in.

    Args:
        loaded: the model and the call of the run.
        saved: the plan, with the rewrites that the kernels stand on.
        chains: other ops of the repository, whose names are taken.

    Raises:
        PlanMismatch: the model gives another graph than the run's, or a kernel's numbers do not pass any more.
    """
    restored = put_together(loaded, saved, PhaseClock(Progress()))
    restored.live.written.restore()
    taken = KernelOps(ops=tuple(chains), by_call={})
    return with_linears(taken, restored.bench, in_cuda(restored.linears)).ops[len(chains) :]


def in_cuda(linears: Sequence[BuiltLinear]) -> list[BuiltLinear]:
    """Return the linear layers that have a CUDA C++ kernel of their own.

    Args:
        linears: as they were built.
    """
    return [one for one in linears if one.source is not None and one.source.config.form in FORMS["cuda"] and not why_not(one)]
