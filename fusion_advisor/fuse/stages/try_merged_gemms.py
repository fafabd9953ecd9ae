"""Merged GEMMs, tried last: the step with every kept rewrite against the same step with its q/k/v and gate/up GEMMs merged.

The chains behind a merged GEMM read slices of a wider tensor. Original pointwise ops lose their vector loads on such slices,
fused kernels do not, so a merge that is timed before the chains would look worse than it is. It is therefore timed on top of
everything that was kept, with those kernels bound (and checked) on the new layouts; its row is the last of the cumulative ones.
"""

from __future__ import annotations

from pathlib import Path

from fusion_advisor.fuse.decide.rebind import CannotMove, Kept, judged, mover, not_replaced, on_changed
from fusion_advisor.fuse.decide.session import PASSES, Bench
from fusion_advisor.fuse.passes.merge_gemms import merge_linears
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.rewrite.region_copy import ChangedRegion
from fusion_advisor.records import MERGED

TITLE = MERGED
_ID = f"R{len(PASSES) + 2}"


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
        options: the keep rule's thresholds; ``freeze`` allows a merged copy of weights that lie apart.
        kernel_dir: where kernels for the new layouts are built.
        progress: told what is found.
        budget_s: seconds for the timing.
        free_bytes: of the device, for copies.

    Returns:
        The same with one more row, and on the merged graphs when merging stays; unchanged when no two linears share an input.
    """
    regions = merge_all(kept.bench, may_copy=options.freeze, free_bytes=free_bytes)
    refusals = [refusal for one in regions for refusal in one.refusals]
    if not any(one.changed for one in regions):
        if not refusals:
            return kept
        reason = f"{len(refusals)} groups were found, none was merged: {refusals[0]}"
        return not_replaced(kept, name=_ID, title=TITLE, reason=reason, sites=len(refusals))
    try:
        merged = on_changed(kept.bench, regions, kept.built, mover(kept, options, kernel_dir, suffix="merged"))
    except CannotMove as refusal:
        return not_replaced(kept, name=_ID, title=TITLE, reason=str(refusal), sites=sum(one.changed for one in regions))
    progress.note(f"{merged.changed} merged GEMMs, timed on top of what was kept")
    memory = f"; copies of {merged.held_bytes:,} bytes are held (--freeze)" if merged.held_bytes else "; no weight is copied"
    left = f"; {len(refusals)} groups were left alone: {refusals[0]}" if refusals else ""
    return judged(kept, merged, name=_ID, title=TITLE, words=f"{memory}{left}", options=options, budget_s=budget_s)


def merge_all(bench: Bench, *, may_copy: bool, free_bytes: int) -> list[ChangedRegion]:
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
