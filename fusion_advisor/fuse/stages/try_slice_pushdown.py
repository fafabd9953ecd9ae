"""Rows that nobody reads, left out: the step with every kept rewrite against the same step with only the rows that are read.

The chains of the last layer have other sizes then and the same kernels mostly: those are bound and checked on them anew. Where a
kernel does not hold both a narrowed chain and one that is not (queries are rotated in one launch with keys, which all tokens
need), queries are computed in full and what follows attention alone is narrowed.
"""

from __future__ import annotations

from pathlib import Path

from fusion_advisor.fuse.decide.rebind import CannotMove, Kept, judged, mover, not_replaced, on_changed
from fusion_advisor.fuse.decide.session import PASSES, Bench
from fusion_advisor.fuse.passes.slice_pushdown import narrow_rows
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.rewrite.region_copy import ChangedRegion
from fusion_advisor.records import NARROWED

TITLE = NARROWED
_ID = f"R{len(PASSES) + 1}"


def leave_out_rows(kept: Kept, options: ApplyOptions, kernel_dir: Path, progress: Progress, *, budget_s: float) -> Kept:
    """Compute only the rows that are read where that pays on top of what was kept.

    Args:
        kept: what was decided so far.
        options: the keep rule's thresholds.
        kernel_dir: where kernels for the new sizes are built.
        progress: told what is found.
        budget_s: seconds for the timing.

    Returns:
        The same with one more row, and on the narrowed graphs when they stay; unchanged where all rows are read.
    """
    refusal, found = "", 0
    for regions in narrow_all(kept.bench):
        changed = sum(one.changed for one in regions)
        found = found or changed
        if not changed:
            refusal = refusal or next(reason for one in regions for reason in one.refusals)
            continue
        try:
            narrowed = on_changed(kept.bench, regions, kept.built, mover(kept, options, kernel_dir, suffix="rows"))
        except CannotMove as error:
            refusal = refusal or str(error)
            continue
        progress.note(f"{narrowed.changed} ops of which only some rows are read, timed on top of what was kept")
        return judged(kept, narrowed, name=_ID, title=TITLE, words="", options=options, budget_s=budget_s)
    return not_replaced(kept, name=_ID, title=TITLE, reason=refusal, sites=found) if refusal else kept


def narrow_all(bench: Bench) -> list[list[ChangedRegion]]:
    """Return narrowed copies of all regions: with queries, then without; none where all rows are read."""
    ways = [[narrow_rows(region, with_queries=with_queries) for region in bench.live.regions] for with_queries in (True, False)]
    return [regions for regions in ways if any(one.changed or one.refusals for one in regions)]
