"""The rewrites that are tried on top of the fusions, in the registry's order: each kind has its own way to be tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.fuse.decide.exact import BitJudge
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.rebind import Kept
from fusion_advisor.fuse.decide.try_fusions import FASTEST
from fusion_advisor.fuse.passes.registry import REWRITES
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.rewrite.record import CollectiveRewrite, EpilogueRewrite, KernelRewrite, LayoutRewrite, ScanRewrite
from fusion_advisor.fuse.stages.linear_kernels import LinearKernels, linear_kernels
from fusion_advisor.fuse.stages.try_collectives import place_sums
from fusion_advisor.fuse.stages.try_epilogues import compute_in_epilogues
from fusion_advisor.fuse.stages.try_layout_change import try_layout_change
from fusion_advisor.fuse.stages.try_linear_kernels import place_gemvs
from fusion_advisor.fuse.stages.try_scans import place_scans
from fusion_advisor.records import RewriteStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How rewrites are tried on top of what was kept.

    Attributes:
        options: the keep rule's thresholds.
        kernel_dir: where kernels are built.
        progress: gets a note for each finding.
        device: of the model.
        budget_s: seconds of timing for all kernels of linears; half as many for any other rewrite.
        free_bytes: of the device, for copies of weights.
        instruments: time the step and decide.
        linear_kernels: says where kernels of linears come from.
    """

    options: ApplyOptions
    kernel_dir: Path
    progress: Progress
    device: torch.device
    budget_s: float
    free_bytes: int
    instruments: Instruments = MEASURED
    linear_kernels: Callable[..., LinearKernels | None] = linear_kernels


def try_on_top(kept: Kept, trial: Trial) -> Kept:
    """Try every rewrite that is judged on top of the fusions, and return what stays."""
    judge = BitJudge(kept, is_on=trial.options.exact, note=trial.progress.note, worst=trial.instruments.worst)
    for rewrite in REWRITES:
        if rewrite.stage is RewriteStage.ON_TOP and trial.options.wants(rewrite.id):
            kept = judge.after(rewrite, _TRY[type(rewrite)](kept, rewrite, trial))
    return kept


def _try_layout_change(kept: Kept, rewrite: LayoutRewrite, trial: Trial) -> Kept:
    return try_layout_change(
        kept, rewrite, trial.options, trial.kernel_dir, trial.progress,
        budget_s=trial.budget_s / 2, free_bytes=trial.free_bytes, instruments=trial.instruments,
    )  # fmt: skip


def _try_epilogues(kept: Kept, rewrite: EpilogueRewrite, trial: Trial) -> Kept:
    return compute_in_epilogues(
        kept, rewrite, trial.options, trial.progress, budget_s=trial.budget_s / 2, instruments=trial.instruments
    )


def _try_kernels(kept: Kept, _rewrite: KernelRewrite, trial: Trial) -> Kept:
    backend = None if trial.options.backend == FASTEST else trial.options.backend  # both languages are timed anyway
    kernels = trial.linear_kernels(trial.kernel_dir, trial.device, backend=backend, log=trial.progress.note)
    return place_gemvs(
        kept, trial.options, trial.progress, budget_s=trial.budget_s, kernels=kernels, instruments=trial.instruments
    )


def _try_scans(kept: Kept, _rewrite: ScanRewrite, trial: Trial) -> Kept:
    return place_scans(
        kept, trial.options, trial.progress, kernel_dir=trial.kernel_dir, budget_s=trial.budget_s, instruments=trial.instruments
    )


def _try_sums(kept: Kept, _rewrite: CollectiveRewrite, trial: Trial) -> Kept:
    return place_sums(
        kept, trial.options, trial.progress, kernel_dir=trial.kernel_dir, budget_s=trial.budget_s, instruments=trial.instruments
    )


_TRY: Mapping[type, Callable[[Kept, Any, Trial], Kept]] = {
    LayoutRewrite: _try_layout_change,
    EpilogueRewrite: _try_epilogues,
    KernelRewrite: _try_kernels,
    ScanRewrite: _try_scans,
    CollectiveRewrite: _try_sums,
}
