"""Sums over ranks with the residual add and the norm after them as one kernel, tried last, on top of all that was kept.

All ranks come to each step of this together: they make the buffers, check the kernel, which meets the other ranks, and time the
step. What one rank cannot have, none has. The kernel is timed in the step alone: by itself it would mostly wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.codegen.common.interface import KernelBuildFailed
from fusion_advisor.collectives.group_kernels import GroupKernels, moved_bytes
from fusion_advisor.collectives.launch_shape import Way
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.rebind import ON_TOP, Kept
from fusion_advisor.fuse.decide.session import Bench, BuiltLinear, members_of, step_of
from fusion_advisor.fuse.decide.step_runner import StepRunner
from fusion_advisor.fuse.decide.trial import source_around
from fusion_advisor.fuse.passes.registry import kept_passes
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.rewrite.collective_kernels import TITLE
from fusion_advisor.fuse.stages.collective_sites import LeftSum, SumKind, build, check, find_kinds, install, ops_of
from fusion_advisor.fuse.stages.gemm_sites import observe_together, ran_out, why_no_room
from fusion_advisor.fuse.stages.try_linear_kernels import is_wanted, with_kernels_of
from fusion_advisor.records import Fusion, Numerics, OpClass, Receipt, Status
from fusion_advisor.verify.check_chain import why_wrong
from fusion_advisor.workload.device import fault_of

_ALONE = "this process decides alone; `apply` under torchrun tries it on all ranks together"
_OTHER_RESIDUALS = "two-shot: the ranks have different residuals or biases, and it adds those of one rank"


def place_sums(
    kept: Kept,
    options: ApplyOptions,
    progress: Progress,
    *,
    kernel_dir: Path,
    budget_s: float,
    instruments: Instruments = MEASURED,
) -> Kept:
    """Let one kernel sum over the ranks, add the residual and normalise where that pays on top of what was kept.

    Args:
        kept: what was decided without it.
        options: the keep rule's thresholds; ``only`` and ``skip`` name the kernel too.
        progress: gets a note for each finding.
        kernel_dir: where its source goes.
        budget_s: seconds for the timing of all kinds.
        instruments: make the kernels of a group, time the step and decide.

    Returns:
        The same with one more fusion for each size of call, and those that stay in ``linears``.
    """
    kinds, left = find_kinds(kept.bench, members_of(kept.linears))
    wanted = [(number, kind) for number, kind in enumerate(kinds, start=1) if is_wanted(kind.title, options)]
    left = left if is_wanted(TITLE, options) else []
    groups = _groups(kept.bench, [kind for _, kind in wanted], instruments)
    rows: list[Fusion] = []
    chosen: list[BuiltLinear] = []
    for number, kind in wanted:
        progress.step(number - 1, len(kinds), f"A{number} {kind.title}: build, check, time")
        row, kernels, built = _row(kept.bench, kind, f"A{number}"), groups[kind.group_name], None
        reason = kernels if isinstance(kernels, str) else kernels.why_not(kind.call)
        if isinstance(kernels, str) or reason:
            row = replace(row, status=Status.NOT_REPLACED, reason=reason)
        else:
            share_s = budget_s / len(wanted)
            row, built = _chosen(kept, row, kind, kernels, chosen, options, kernel_dir, instruments, budget_s=share_s)
        chosen += [] if built is None else [built]
        progress.note(f"{row.id} {row.kernel}: {row.status}, {row.reason}")
        rows.append(row)
    if not chosen:
        for kernels in groups.values():
            if not isinstance(kernels, str):
                kernels.release()
    rows += [_left_row(kept.bench, same, f"A{n}") for n, same in enumerate(_by_reason(left), start=len(kinds) + 1)]
    return with_kernels_of(kept, rows, chosen)


def _groups(bench: Bench, kinds: Sequence[SumKind], instruments: Instruments) -> dict[str, GroupKernels | str]:
    """Return the kernels of each group, or why it has none."""
    names = dict.fromkeys(kind.group_name for kind in kinds)
    if instruments.group_kernels is None:
        return dict.fromkeys(names, _ALONE)
    return {name: instruments.group_kernels(name, bench.device) for name in names}


def _chosen(
    kept: Kept,
    row: Fusion,
    kind: SumKind,
    kernels: GroupKernels,
    chosen: Sequence[BuiltLinear],
    options: ApplyOptions,
    kernel_dir: Path,
    instruments: Instruments,
    *,
    budget_s: float,
) -> tuple[Fusion, BuiltLinear | None]:
    """Return the row of the faster way to sum, and its calls where they stay."""
    bench, found = kept.bench, []
    try:
        if refusal := why_no_room(bench, kind.places, instruments) or observe_together(bench, kind.places, instruments):
            return replace(row, status=Status.NOT_REPLACED, reason=refusal), None
        surprise = next((bench.surprises[i] for place in kind.places for i in place.inputs if i in bench.surprises), "")
        if refusal := instruments.worst(surprise):
            return replace(row, status=Status.NOT_REPLACED, reason=refusal), None
        ways = kernels.ways(kind.call) if options.is_timed else kernels.ways(kind.call)[:1]
        for way in ways:
            one = _tried(bench, row, kind, kernels, way, options, kernel_dir, instruments)
            if one[1] is not None:
                one = _timed(kept, one[0], chosen, one[1], options, instruments, budget_s=budget_s / len(ways))
            found.append(one)
    except (RuntimeError, MemoryError) as error:
        if instruments.exchange is not None:  # the check and the step meet other ranks, which wait in them
            raise
        return replace(row, status=Status.NOT_REPLACED, reason=ran_out(error)), None
    finally:
        bench.values.clear()
    stays = [one for one in found if one[0].status is Status.KEPT]
    best = min(stays or found[:1], key=lambda one: one[0].step_delta_ns or 0)
    others = [f"{_way(other[0])}: {other[0].reason}" for other in found if other is not best]
    held = f"; it holds {kernels.held_bytes / 2**20:.0f} MiB on each rank" if stays else ""
    best_row = replace(best[0], reason="; ".join([f"{best[0].reason}{held}", *others]))
    return best_row, best[1] if stays else None


def _way(row: Fusion) -> str:
    return row.rendered[0].tuning.split(" ")[0] if row.rendered else "another way"


def _tried(
    bench: Bench,
    row: Fusion,
    kind: SumKind,
    kernels: GroupKernels,
    way: Way,
    options: ApplyOptions,
    kernel_dir: Path,
    instruments: Instruments,
) -> tuple[Fusion, BuiltLinear | None]:
    """Build and check one way to sum; on every rank, or on none."""
    if way == "two-shot" and not _are_residuals_equal(bench, kind, instruments):
        return replace(row, status=Status.NOT_REPLACED, reason=_OTHER_RESIDUALS), None

    def wrong(numerics: Numerics) -> str:
        return instruments.worst("" if numerics.is_passed else why_wrong(numerics, options.tolerance))

    problem, made = "", None
    try:
        made = build(kind, kernels, way, kernel_dir / f"{row.id}_{kind.title}")
    except KernelBuildFailed as failure:
        problem = str(failure)
    if problem := instruments.worst(problem):
        return replace(row, status=Status.BUILD_FAILED, reason=problem), None
    assert made is not None  # else there was a problem
    row = replace(row, rendered=(made.kernel,), kernel_bytes=moved_bytes(kind.call, way, kernels.world_size))
    try:
        numerics, problem = check(bench, kind, made, tolerance=options.tolerance, worst=wrong)
    except torch.AcceleratorError as error:
        raise fault_of(kind.title, error) from error
    row = replace(row, numerics=numerics)
    if problem:
        return replace(row, status=Status.WRONG_NUMBERS, reason=problem), None
    return row, install(bench, kind, made, name=row.id)


def _are_residuals_equal(bench: Bench, kind: SumKind, instruments: Instruments) -> bool:
    """Whether all ranks add the same residual, and the same bias of a linear, at each site of the captured call."""
    offsets = slice(-1, None) if kind.call.has_offset else slice(0)
    sums = [_bits(bench.values[index]) for place in kind.places for index in (place.inputs[1], *place.inputs[offsets])]
    told: Sequence[Any] = [sums] if instruments.exchange is None else instruments.exchange("residuals", sums)
    return all(one == told[0] for one in told)


def _bits(tensor: torch.Tensor) -> tuple[int, int]:
    """Return two sums of a tensor's bits, of which one depends on their places."""
    words = tensor.contiguous().flatten().view(torch.int16).long()
    return int(words.sum()), int((words * (torch.arange(words.numel(), device=words.device) % 65521 + 1)).sum())


def _timed(
    kept: Kept,
    row: Fusion,
    chosen: Sequence[BuiltLinear],
    built: BuiltLinear,
    options: ApplyOptions,
    instruments: Instruments,
    *,
    budget_s: float,
) -> tuple[Fusion, BuiltLinear]:
    """Time the step with the kernel against the step without, as the slowest rank sees both."""
    passes = kept_passes(kept.rewrites)
    before = step_of(kept.bench, kept.built, passes, [*kept.linears, *chosen])
    after = step_of(kept.bench, kept.built, passes, [*kept.linears, *chosen, built])
    verdict = instruments.on_top(
        StepRunner(kept.bench), before.run, after.run,
        name=row.id, min_gain=options.min_gain, confidence=options.confidence, budget_s=budget_s, is_timed=options.is_timed,
    )  # fmt: skip
    reason = f"{verdict.reason}{ON_TOP if verdict.is_timed else ''}"
    row = replace(
        row, status=verdict.status, reason=reason, is_timed_alone=verdict.is_timed_alone, step_delta_ns=verdict.step_delta_ns,
        step_delta_ci_ns=verdict.step_delta_ci_ns, predicted_saving_ns=None,
    )  # fmt: skip
    return row, built


def _row(bench: Bench, kind: SumKind, name: str) -> Fusion:
    ops, runs = ops_of(bench, kind), bench.live.runs_of_regions()
    launches = sum(runs[op.region] for op in ops if op.op_class not in (OpClass.VIEW, OpClass.INPUT))
    first = ops[0]
    return _planned(kind.title, len(kind.sites), launches, source_around(first.source_file, first.source_line), name)


def _planned(title: str, sites: int, launches: int, source: tuple[tuple[int, str], ...], name: str) -> Fusion:
    return Fusion(
        id=name, chain_id="", kernel=title, status=Status.PLANNED, reason="",
        receipt=Receipt(sites_found=sites, sites_matched=sites, sites_replaced=0, launches_before=launches, launches_after=0),
        original_source=source,
    )  # fmt: skip


def _by_reason(left: Sequence[LeftSum]) -> list[list[LeftSum]]:
    found: dict[str, list[LeftSum]] = {}
    for one in left:
        found.setdefault(one.reason, []).append(one)
    return list(found.values())


def _left_row(bench: Bench, left: Sequence[LeftSum], name: str) -> Fusion:
    """Return the row of sums that stay, for one reason."""
    first = bench.ops[left[0].index]
    row = _planned(TITLE, len(left), len(left), source_around(first.source_file, first.source_line), name)
    return replace(row, status=Status.NOT_REPLACED, reason=left[0].reason)
