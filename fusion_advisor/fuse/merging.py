"""Merged GEMMs, tried last: the step with every kept rewrite against the same step with its q/k/v and gate/up GEMMs merged.

The chains behind a merged GEMM read slices of a wider tensor. Original pointwise ops lose their vector loads on such slices,
fused kernels do not, so a merge that is timed before the chains would look worse than it is. It is therefore timed on top of
everything that was kept, with those kernels bound (and checked) on the new layouts; its row is the last of the cumulative ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusion_advisor.fuse.bench import PASSES, Bench, BuiltFusion, BuiltGemv
from fusion_advisor.fuse.decide import Decision, StepRunner, Verdict, confirmed, on_top
from fusion_advisor.fuse.options import ApplyOptions
from fusion_advisor.fuse.passes.merge import MergedRegion, merge_linears
from fusion_advisor.fuse.plan import PlannedFusion
from fusion_advisor.fuse.progress import Progress
from fusion_advisor.fuse.relocate import merged_bench, relocate
from fusion_advisor.fuse.select import kept_passes
from fusion_advisor.fuse.trial import try_fusion
from fusion_advisor.library.rule import CannotLower
from fusion_advisor.records import MERGED, Fusion, GraphRewrite, RenderedKernel, Status, Tolerance

TITLE = MERGED
_ID = f"R{len(PASSES) + 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What stays in the model, the bench whose graphs it is written into, and the one that has the graphs as captured."""

    bench: Bench
    captured: Bench
    decision: Decision
    rewrites: tuple[GraphRewrite, ...]
    fusions: list[Fusion]
    built: list[BuiltFusion]
    gemvs: tuple[BuiltGemv, ...] = ()
    """Kernels of linears on few rows; where one stands, no fusion does."""


class CannotMove(Exception):
    """A kept fusion has no passing kernel on the merged layout; the text says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedStep:
    """A bench over merged graphs with the kept fusions on it."""

    bench: Bench
    built: list[BuiltFusion]
    kernels: dict[str, tuple[RenderedKernel, ...]]
    """What runs on the merged graphs, by fusion id."""
    merged: int
    held_bytes: int


def merge_gemms(
    kept: Kept,
    options: ApplyOptions,
    kernel_dir: Path,
    progress: Progress,
    *,
    budget_s: float,
    free_bytes: int,
) -> Kept:
    """Merge GEMMs where that pays on top of what was kept.

    Args:
        kept: what was decided without merging.
        options: the keep rule's thresholds; ``merge_copies`` allows a merged copy of weights that lie apart.
        kernel_dir: where kernels for the new layouts are built.
        progress: told what is found.
        budget_s: seconds for the timing.
        free_bytes: of the device, for copies.

    Returns:
        The same with one more row, and on the merged graphs when merging stays; unchanged when no two linears share an input.
    """
    regions = merge_all(kept.bench, may_copy=options.merge_copies, free_bytes=free_bytes)
    refusals = [refusal for one in regions for refusal in one.refusals]
    if not any(one.merged for one in regions):
        if not refusals:
            return kept
        return _refused(kept, f"{len(refusals)} groups were found, none was merged: {refusals[0]}", len(refusals))
    backends = {item.planned.id: item.kernel.backend for item in kept.built}
    try:
        merged = on_merged(
            kept.bench,
            regions,
            kept.built,
            mover(kernel_dir, backends=backends, fast_math=options.fast_math, tolerance=options.tolerance),
        )
    except CannotMove as refusal:
        return _refused(kept, str(refusal), sum(one.merged for one in regions))
    progress.note(f"{merged.merged} merged GEMMs, timed on top of what was kept")
    return _judged(kept, merged, refusals, options, budget_s)


def merge_all(bench: Bench, *, may_copy: bool, free_bytes: int) -> list[MergedRegion]:
    """Merge linears in a copy of every region.

    Args:
        bench: its regions stay as they are.
        may_copy: hold merged copies of weights that lie apart, where all of them fit.
        free_bytes: of the device.
    """
    weights = sum(
        value.numel() * value.element_size()
        for region in bench.live.regions
        for value, role in zip(region.example_args, region.roles, strict=True)
        if role == "parameter"
    )
    return [merge_linears(region, may_copy=may_copy and weights < free_bytes) for region in bench.live.regions]


Move = Callable[[Bench, PlannedFusion, int], tuple[BuiltFusion, RenderedKernel]]


def mover(kernel_dir: Path, *, backends: Mapping[str, str], fast_math: bool, tolerance: Tolerance | None = None) -> Move:
    """Return what builds and checks a fusion on a new layout.

    Args:
        kernel_dir: where its source goes, beside the kernel of the layout before.
        backends: ``triton``, ``cuda`` or ``cpp`` by the fusion's id, as its kernel is written on the layout before.
        fast_math: let the kernel approximate.
        tolerance: the user's limit on its errors.
    """

    def move(bench: Bench, planned: PlannedFusion, number: int) -> tuple[BuiltFusion, RenderedKernel]:
        named = replace(planned, id=f"{planned.id}_merged{number}")
        trial = try_fusion(
            bench,
            named,
            backend=backends[planned.id],
            fast_math=fast_math,
            tolerance=tolerance,
            kernel_dir=kernel_dir,
            seed=number,
            is_timed=False,
        )
        if trial.built is None:
            raise CannotMove(f"{planned.id} on the merged layout: {trial.fusion.reason}")
        return bench.install(planned, trial.built.kernel, trial.built.built), trial.built.kernel

    return move


def on_merged(bench: Bench, regions: Sequence[MergedRegion], built: Sequence[BuiltFusion], move: Move) -> MergedStep:
    """Bind fusions on merged graphs; those whose layouts did not change keep their kernels.

    Args:
        bench: over the graphs before merging.
        regions: from :func:`merge_all`.
        built: fusions of ``bench`` that stay.
        move: builds a fusion whose layout changed.

    Raises:
        CannotMove: a fusion cannot be had on the new layout.
    """
    new, moved = on_merged_graphs(bench, regions, [item.planned for item in built])
    pairs = [(item, planned) for item, parts in zip(built, moved, strict=True) for planned in parts]
    new.observe([planned for _, planned in pairs])
    result: list[BuiltFusion] = []
    kernels: dict[str, tuple[RenderedKernel, ...]] = {}
    for number, (item, planned) in enumerate(pairs):
        if planned.program == item.planned.program:
            fresh, rendered = new.install(planned, item.kernel, item.built), item.kernel
        else:
            fresh, rendered = move(new, planned, number)
        kernels[planned.id] = (*kernels.get(planned.id, ()), rendered)
        if fresh.refusals:
            raise CannotMove(f"{planned.id} on the merged layout: {fresh.refusals[0]}")
        result.append(fresh)
    return MergedStep(
        bench=new,
        built=result,
        kernels=kernels,
        merged=sum(one.merged for one in regions),
        held_bytes=sum(one.held_bytes for one in regions),
    )


def on_merged_graphs(
    bench: Bench, regions: Sequence[MergedRegion], planned: Sequence[PlannedFusion]
) -> tuple[Bench, list[list[PlannedFusion]]]:
    """Find fusions in merged graphs; nothing is built.

    Args:
        bench: over the graphs before merging.
        regions: from :func:`merge_all`.
        planned: of ``bench``.

    Returns:
        A bench over the merged graphs, and for each fusion what it is there: one or more, where sites came to differ.

    Raises:
        CannotMove: a fusion is no single kernel on the new layout.
    """
    new, moved = merged_bench(bench, regions)
    found = []
    for one in planned:
        try:
            found.append(relocate(one, new, moved))
        except CannotLower as refusal:
            raise CannotMove(f"{one.id} on the merged layout: {refusal.reason}") from refusal
    return new, found


def _judged(kept: Kept, merged: MergedStep, refusals: Sequence[str], options: ApplyOptions, budget_s: float) -> Kept:
    passes = kept_passes(kept.rewrites)
    plain, with_merge = kept.bench.build(kept.built, passes), merged.bench.build(merged.built, passes)

    def before() -> Any:
        return kept.bench.run(plain)

    def after() -> Any:
        return merged.bench.run(with_merge)

    runner = StepRunner(kept.bench)
    verdict = on_top(runner, before, after, name=_ID, min_gain=options.min_gain, confidence=options.confidence, budget_s=budget_s)
    row = _row(verdict, merged, refusals)
    rewrites = (*kept.rewrites, row)
    if verdict.status is not Status.KEPT:
        return replace(kept, rewrites=rewrites)
    untouched = kept.captured.build((), ())

    def original() -> Any:
        return kept.captured.run(untouched)

    decision = confirmed(runner, kept.decision, original, after, budget_s=budget_s / 3)
    fusions = [
        replace(fusion, rendered=merged.kernels[fusion.id]) if fusion.id in merged.kernels else fusion for fusion in kept.fusions
    ]
    return replace(kept, bench=merged.bench, decision=decision, rewrites=rewrites, fusions=fusions, built=merged.built)


def _row(verdict: Verdict, merged: MergedStep, refusals: Sequence[str]) -> GraphRewrite:
    memory = f"copies of {merged.held_bytes:,} bytes are held" if merged.held_bytes else "no weight is copied"
    left = f"; {len(refusals)} groups were left alone: {refusals[0]}" if refusals else ""
    return GraphRewrite(
        id=verdict.id,
        name=TITLE,
        status=verdict.status,
        reason=f"{verdict.reason} (timed last, on top of all that was kept); {memory}{left}",
        sites=merged.merged,
        step_delta_ns=verdict.delta_ns,
        step_delta_ci_ns=verdict.interval_ns,
        held_bytes=merged.held_bytes if verdict.status is Status.KEPT else 0,
    )


def _refused(kept: Kept, reason: str, sites: int) -> Kept:
    row = GraphRewrite(id=_ID, name=TITLE, status=Status.NOT_REPLACED, reason=reason, sites=sites)
    return replace(kept, rewrites=(*kept.rewrites, row))
