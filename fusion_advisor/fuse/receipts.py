"""What a report's rows say of the live model: replaced sites, launches, kernels, or that everything was reverted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion_advisor.capture.trace.attribute import Step
from fusion_advisor.fuse.decide import step_profile
from fusion_advisor.fuse.decide.session import Variant, calls_in_step, replaced_sites
from fusion_advisor.fuse.rewrite.layout_copy import kernels_of
from fusion_advisor.records import Fusion, GraphRewrite, Report, Status

UNREAD = "the rewritten step reads none of its results, so none of its sites is left"
"""In Mamba's associative scan the model itself drops half of what its ops compute."""


def with_receipt(fusion: Fusion, variant: Variant, after_step: Step, runs: Sequence[int]) -> Fusion:
    """Fill in what the live model and the after-trace say; fusions that differ only in sizes share a kernel and its launches."""
    replaced = replaced_sites(variant)
    if fusion.id not in replaced:
        return fusion if fusion.status is not Status.KEPT else replace(fusion, status=Status.NOT_REPLACED, reason=UNREAD)
    calls = calls_in_step(variant, runs)
    launches, refusals = 0, fusion.receipt.refusals
    for (owner, name), own in calls.items():
        if owner != fusion.id:
            continue
        called = sum(often for (_, other), often in calls.items() if other == name)
        seen = step_profile.launches_of(after_step, name)
        if seen != called:
            refusals = (*refusals, f"{name} was launched {seen} times where its sites call it {called} times")
        launches += own if seen == called else min(seen, own)
    receipt = replace(fusion.receipt, sites_replaced=replaced[fusion.id], launches_after=launches, refusals=refusals)
    return replace(fusion, receipt=receipt)


def with_kernels(row: GraphRewrite, variant: Variant) -> GraphRewrite:
    """Name the kernels that a kept rewrite put in, as files of the run."""
    made = kernels_of(variant.modules, row.id) if row.status is Status.KEPT else ()
    return replace(row, rendered=tuple(replace(kernel, path=f"kernels/{row.id}_{kernel.path}") for kernel in made))


def reverted(report: Report, reason: str, status: Status = Status.NOT_REPLACED) -> Report:
    """Return a report of which nothing stays in the model after all.

    Args:
        report: of what was kept.
        reason: a sentence, which becomes a warning too.
        status: of all that was kept.
    """
    return replace(
        report,
        fusions=tuple(reverted_fusion(fusion, reason, status) for fusion in report.fusions),
        rewrites=tuple(reverted_rewrite(rewrite, reason, status) for rewrite in report.rewrites),
        frozen=(),
        warnings=(*report.warnings, reason),
    )


def reverted_fusion(fusion: Fusion, reason: str, status: Status = Status.NOT_REPLACED) -> Fusion:
    """Return a fusion's row that does not stay after all."""
    if fusion.status not in (Status.KEPT, Status.ABSORBED):
        return fusion
    receipt = replace(fusion.receipt, sites_replaced=0, launches_after=0)
    return replace(fusion, status=status, reason=reason, receipt=receipt)


def reverted_rewrite(rewrite: GraphRewrite, reason: str, status: Status = Status.NOT_REPLACED) -> GraphRewrite:
    """Return a graph rewrite's row that does not stay after all."""
    return rewrite if rewrite.status is not Status.KEPT else replace(rewrite, status=status, reason=reason)
