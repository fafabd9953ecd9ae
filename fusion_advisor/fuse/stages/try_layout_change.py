"""Changes of layouts: the step with every kept rewrite against the same step on changed graphs.

Chains read other layouts or sizes there: slices of a merged GEMM's result, the rows that are read. Original pointwise ops lose
their vector loads on slices, fused kernels do not, so a change that is timed before the chains would look worse than it is. It is
therefore timed on top of everything that was kept, with those kernels bound, and checked, on the new layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.rebind import (
    CannotMove,
    Kept,
    changed_bench,
    judged,
    mover,
    not_replaced,
    on_changed,
    on_changed_graphs,
)
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.plan import PlannedFusion
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.rewrite.record import CopyRoom, LayoutRewrite
from fusion_advisor.fuse.rewrite.region_copy import ChangedRegion
from fusion_advisor.records import GraphRewrite


def try_layout_change(
    kept: Kept,
    rewrite: LayoutRewrite,
    options: ApplyOptions,
    kernel_dir: Path,
    progress: Progress,
    *,
    budget_s: float,
    free_bytes: int,
    instruments: Instruments = MEASURED,
) -> Kept:
    """Change layouts where that pays on top of what was kept.

    Args:
        kept: what was decided so far.
        rewrite: what to change.
        options: the keep rule's thresholds; ``freeze`` allows copies of weights.
        kernel_dir: where kernels for the new layouts are built.
        progress: gets a note for each finding.
        budget_s: seconds for the timing.
        free_bytes: of the device, for copies.
        instruments: time the step and decide.

    Returns:
        The same with one more row, and on the changed graphs when they stay; unchanged where there is nothing to change.
    """
    reason, found = "", 0
    for regions in rewrite.change(kept.bench.live.regions, CopyRoom(may_copy=options.freeze, free_bytes=free_bytes)):
        refusals = _refusals(regions)
        sites = _changed(regions)
        found = found or sites or len(refusals)
        if not sites:
            reason = reason or _left_alone(refusals)
            continue
        try:
            move = mover(kept, options, kernel_dir, suffix=rewrite.suffix, instruments=instruments)
            changed = on_changed(kept.bench, regions, kept.built, move)
        except CannotMove as error:
            reason = reason or str(error)
            continue
        progress.note(f"{rewrite.title}: {sites} sites, timed on top of what was kept")
        words = _memory(rewrite, changed.held_bytes)
        words += f"; {len(refusals)} sites were left alone: {refusals[0]}" if refusals else ""
        return judged(kept, changed, rewrite, words=words, options=options, budget_s=budget_s, instruments=instruments)
    return not_replaced(kept, rewrite, reason=reason, sites=found) if reason else kept


def change_again(
    bench: Bench, fusions: Sequence[PlannedFusion], rewrite: LayoutRewrite, row: GraphRewrite, *, free_bytes: int
) -> tuple[Bench, list[PlannedFusion]]:
    """Change the graphs as a saved plan did, and find its fusions there.

    Args:
        bench: over the graphs before the change.
        fusions: of the plan, in them.
        rewrite: what to change.
        row: of the plan's report: how many sites were changed, and whether weights were copied.
        free_bytes: of the device, for copies.

    Returns:
        A bench over the changed graphs, and the fusions in them.

    Raises:
        CannotMove: other sites would be changed, or a fusion is no single kernel on the new layout.
    """
    seen: list[str] = []
    for regions in rewrite.change(bench.live.regions, CopyRoom(may_copy=row.held_bytes > 0, free_bytes=free_bytes)):
        if _changed(regions) == row.sites:
            new, found = on_changed_graphs(bench, regions, fusions)
            return new, [one for parts in found for one in parts]
        seen += _refusals(regions)
    why = f": {seen[0]}" if seen else ""
    raise CannotMove(f"the {row.sites} sites of its {rewrite.title} are not to be had here{why}")


def change_for_other_shape(bench: Bench, rewrite: LayoutRewrite) -> Bench:
    """Return a bench over the graphs of another call, changed as the plan's were.

    Only the plan makes a copy of weights, so weights that are not adjacent in memory stay as they are here.
    """
    for regions in rewrite.change(bench.live.regions, CopyRoom()):
        return changed_bench(bench, regions)[0]
    return bench


def _changed(regions: Sequence[ChangedRegion]) -> int:
    return sum(one.changed for one in regions)


def _refusals(regions: Sequence[ChangedRegion]) -> list[str]:
    return [refusal for one in regions for refusal in one.refusals]


def _left_alone(refusals: Sequence[str]) -> str:
    if not refusals:
        return ""
    return refusals[0] if len(refusals) == 1 else f"none of {len(refusals)} sites was changed: {refusals[0]}"


def _memory(rewrite: LayoutRewrite, held_bytes: int) -> str:
    if held_bytes:
        return f"; {held_bytes:,} bytes of copies stay in memory (--freeze)"
    return "; no weight is copied" if rewrite.copies_weights else ""
