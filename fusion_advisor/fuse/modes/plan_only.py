"""``plan``: what ``apply`` would try on a step, from its capture alone.

Ranking, matching and the bounds need records only. torch is loaded to trace the library's references on the CPU; nothing runs on
a device, and nothing is built or timed.
"""

from __future__ import annotations

from pathlib import Path

from fusion_advisor.chains.launch_bound import judge_launches
from fusion_advisor.fuse.passes.registry import REWRITES
from fusion_advisor.fuse.plan.options import ProfileOptions
from fusion_advisor.fuse.plan.plan import Plan, make_plan
from fusion_advisor.fuse.plan.without_kernel import candidate_sites
from fusion_advisor.library.patterns import library_on_demand
from fusion_advisor.records import Capture, ChainPlan, PlanPreview, RewriteCandidate
from fusion_advisor.records.serialize import read_capture


def plan_capture(path: Path, options: ProfileOptions) -> PlanPreview:
    """Plan a captured step.

    Args:
        path: ``capture.json`` or ``capture.json.gz``.
        options: ``top``, ``min_share``, ``only``, ``skip``, ``kernel_dirs`` and ``exact`` count; the others are not read.

    Raises:
        UnreadableReport: the file is no whole capture.
        UnknownSchema: another version wrote it.
        BadReference: a kernel of ``kernel_dirs`` cannot be traced.
    """
    capture = read_capture(path)
    patterns, sources = library_on_demand(options.kernel_dirs)
    plan = make_plan(
        capture,
        patterns,
        min_share=options.min_share,
        top=options.top,
        only=options.only_kernels,
        skip=options.skipped_kernels,
        sources=sources,
        is_exact=options.exact,
    )
    return preview(capture, plan, options, str(path))


def preview(capture: Capture, plan: Plan, options: ProfileOptions, source: str) -> PlanPreview:
    """Describe a plan, the bounds of its savings and the rewrites without a kernel that may have sites.

    Args:
        capture: that was planned.
        plan: made of it.
        options: whose patterns choose among the rewrites.
        source: the capture's name.
    """
    fusion_of = {fusion.chain.id: fusion.id for fusion in plan.fusions}
    chains = []
    for chain, answer in zip(plan.chains, plan.answers, strict=True):
        fusion = fusion_of.get(chain.id, "")
        chains.append(
            ChainPlan(
                chain=chain,
                answer=answer,
                fusion=fusion,
                saving_ns=chain.saving_bound_ns if fusion else 0,
                launches_after=chain.runs if fusion else chain.launches,
            )
        )
    sites = candidate_sites(capture)
    candidates = (
        RewriteCandidate(id=rewrite.id, title=rewrite.title, sites=sites[rewrite.id])
        for rewrite in REWRITES
        if rewrite.id in sites and options.wants(rewrite.id)
    )
    return PlanPreview(
        source=source,
        workload=capture.workload,
        environment=capture.environment,
        step_ns=capture.eager_step.median_ns,
        device_ns=sum(launch.duration_ns for launch in capture.launches),
        launches=len(capture.launches),
        chains=tuple(chains),
        candidates=tuple(candidates),
        unused=(*plan.unused, *options.unused_patterns(rewrite.id for rewrite in REWRITES)),
        launch_verdict=judge_launches(capture, plan.chains, plan.answers),
    )
