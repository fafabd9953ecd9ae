"""What stages on top of the fusions will have compiled, known before the fusions are tried.

The kernels of a changed layout and those of linears follow from the captured graphs alone. In a run of Qwen2.5-7B, 1 x 512, on an
H200 their compilers took 4 s of the process that times kernels. The processes that compile ahead have nothing else to do by then.
Figures: ``docs/measurements/keep_rule.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from fusion_advisor.autotune.build_ahead import Job, LinearJob
from fusion_advisor.autotune.select_gemm import is_served, jobs_for
from fusion_advisor.autotune.tune import Gpu, jobs_of
from fusion_advisor.codegen.gemm.problem import GemvProblem
from fusion_advisor.codegen.gemm.registry import LINEAR_BACKENDS
from fusion_advisor.fuse.decide.rebind import CannotMove, on_changed_graphs
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.decide.try_fusions import FASTEST, backends_of
from fusion_advisor.fuse.passes.linear_sites import LINEAR_KERNELS
from fusion_advisor.fuse.passes.registry import LAYOUT_CHANGES
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.plan import PlannedFusion
from fusion_advisor.fuse.rewrite.record import CopyRoom, LayoutRewrite
from fusion_advisor.fuse.stages.linear_kernels import header_of
from fusion_advisor.fuse.stages.linear_kinds import find_kinds
from fusion_advisor.fuse.stages.try_linear_kernels import is_wanted


def jobs_of_later(
    bench: Bench,
    fusions: Sequence[PlannedFusion],
    options: ApplyOptions,
    device: torch.device,
    *,
    gpu: Gpu | None = None,
    is_served: Callable[[GemvProblem, torch.device], bool] = is_served,
) -> Iterator[Job | LinearJob]:
    """Yield the kernels that the stages after the fusions will ask for if every rewrite stays; nothing is built here.

    Args:
        bench: over the graphs as captured.
        fusions: that are tried.
        options: which rewrites are wanted, backend and fast_math.
        device: where they will run.
        gpu: that of the device by default.
        is_served: whether there may be a kernel for a linear.
    """
    gpu = gpu or Gpu(device)
    current, planned = bench, list(fusions)
    for rewrite in LAYOUT_CHANGES.values():
        found = _changed(current, planned, rewrite) if options.wants(rewrite.id) else None
        if found is None:
            continue
        known = {one.program for one in planned}
        current, planned = found
        for one in planned:
            if one.program in known:
                continue
            for backend in backends_of(options.backend, one.program, on_cuda=bench.on_cuda):
                yield from jobs_of(
                    one.program, one.tunables, backend, device, header=one.header, fast_math=options.fast_math, gpu=gpu
                )
    if options.wants(LINEAR_KERNELS.id):
        backends = tuple(name for name in LINEAR_BACKENDS if options.backend in (None, FASTEST, name))
        for kind in find_kinds(current):
            if is_wanted(kind.title, options) and is_served(kind.problem, device):
                yield from jobs_for(kind.problem, device, header=header_of(kind.title), backends=backends, gpu=gpu)


def _changed(bench: Bench, planned: Sequence[PlannedFusion], rewrite: LayoutRewrite) -> tuple[Bench, list[PlannedFusion]] | None:
    """Return the step on the graphs that a change prefers, without copies of weights; None where it changes nothing."""
    for regions in rewrite.change(bench.live.regions, CopyRoom()):
        if not any(one.changed for one in regions):
            continue
        try:
            new, moved = on_changed_graphs(bench, regions, planned)
        except CannotMove:
            continue
        return new, [one for parts in moved for one in parts]
    return None
