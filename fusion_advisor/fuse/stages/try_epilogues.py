"""Activations in the epilogue of the GEMM that they follow: cuBLAS computes what the model or a kernel launches for itself.

Every place is checked on its own tensors against the ops that it replaces; all are timed in the step on top of all that was kept,
and alone against what the step has in their places. What was a kernel of its own until then (a ``gelu_tanh``) is part of a
GEMM's; its row says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.rebind import ON_TOP, Kept, not_replaced
from fusion_advisor.fuse.decide.session import Bench, BuiltLinear, step_of
from fusion_advisor.fuse.decide.step_runner import StepRunner
from fusion_advisor.fuse.passes.gemm_epilogue import GEMM_EPILOGUE
from fusion_advisor.fuse.passes.registry import kept_passes, row_of
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.plan import PlannedFusion
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.rewrite.graph_rewriter import SiteRewrite
from fusion_advisor.fuse.rewrite.record import EpilogueRewrite
from fusion_advisor.fuse.stages.gemm_sites import (
    Place,
    observe_together,
    original_of,
    own_classes,
    ran_out,
    why_no_room,
    without_taken,
)
from fusion_advisor.records import Numerics, Status, Tolerance
from fusion_advisor.verify.check_chain import SCALES, check_calls, random_like, why_wrong, with_special_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A call of cuBLAS and where it would stand."""

    place: Place
    call: Callable[..., Any]


def compute_in_epilogues(
    kept: Kept,
    rewrite: EpilogueRewrite,
    options: ApplyOptions,
    progress: Progress,
    *,
    budget_s: float,
    instruments: Instruments = MEASURED,
) -> Kept:
    """Let GEMMs compute the activations after them where that pays on top of what was kept.

    Args:
        kept: what was decided so far.
        rewrite: its record.
        options: the keep rule's thresholds, and the user's limit on errors.
        progress: gets a note for each finding.
        budget_s: seconds for the timing.
        instruments: time the step and decide.

    Returns:
        The same with one more row, and with the calls in ``linears`` when they stay; unchanged where none follows a GEMM.
    """
    found, refusals = find_places(kept.bench, [item.planned for item in kept.built], rewrite, fast_math=options.fast_math)
    if not found:
        reason = f"{len(refusals)} activations follow a GEMM, and none was moved: {refusals[0]}" if refusals else ""
        return not_replaced(kept, rewrite, reason=reason, sites=len(refusals)) if refusals else kept
    checked = _checked(kept.bench, found, options, instruments)
    reason = instruments.worst(checked if isinstance(checked, str) else "")
    if reason or isinstance(checked, str):
        return not_replaced(kept, rewrite, reason=reason, sites=len(found))
    if reason := instruments.worst("" if checked.is_passed else why_wrong(checked, options.tolerance)):
        row = row_of(rewrite, status=Status.WRONG_NUMBERS, reason=reason, sites=len(found))
        return replace(kept, rewrites=(*kept.rewrites, row))
    progress.note(f"{len(found)} activations after GEMMs, timed on top of the kept rewrites")
    errors = f"relative error {checked.fused_rel_l2:.1e} against float64, of the separate ops {checked.eager_rel_l2:.1e}"
    left = f"; {len(refusals)} were left alone: {refusals[0]}" if refusals else ""
    return _timed(kept, rewrite, found, options, instruments, words=f"; {errors}{left}", budget_s=budget_s)


def _checked(bench: Bench, found: Sequence[Placed], options: ApplyOptions, instruments: Instruments) -> Numerics | str:
    """Return the errors of the calls on every place's own tensors, or why they cannot be checked."""
    places = [one.place for one in found]
    try:
        if refusal := why_no_room(bench, places, instruments) or observe_together(bench, places, instruments):
            return refusal
        surprise = next((bench.surprises[index] for one in places for index in one.inputs if index in bench.surprises), None)
        try:
            return surprise or check(bench, found, fast_math=options.fast_math, tolerance=options.tolerance)
        except (RuntimeError, MemoryError) as error:
            return ran_out(error)
    finally:
        bench.values.clear()  # activations of every layer


def _timed(
    kept: Kept,
    rewrite: EpilogueRewrite,
    found: Sequence[Placed],
    options: ApplyOptions,
    instruments: Instruments,
    *,
    words: str,
    budget_s: float,
) -> Kept:
    passes, linear, runner = kept_passes(kept.rewrites), built_of(found), StepRunner(kept.bench)
    without = step_of(kept.bench, kept.built, passes, kept.linears)
    with_epilogues = step_of(kept.bench, kept.built, passes, [*kept.linears, linear])
    verdict = instruments.on_top(
        runner, without.run, with_epilogues.run,
        name=rewrite.id, min_gain=options.min_gain, confidence=options.confidence, budget_s=budget_s, is_timed=options.is_timed,
    )  # fmt: skip
    reason = f"{verdict.reason}{ON_TOP if verdict.is_timed else ''}{words}"
    row = replace(
        row_of(rewrite, status=verdict.status, reason=reason, sites=len(found)),
        step_delta_ns=verdict.step_delta_ns,
        step_delta_ci_ns=verdict.step_delta_ci_ns,
        predicted_saving_ns=instruments.saving_alone_ns(runner, without, with_epilogues) if options.is_timed else None,
    )
    rewrites = (*kept.rewrites, row)
    if verdict.status is not Status.KEPT:
        return replace(kept, rewrites=rewrites)
    titles = {rewrite.id: f"{rewrite.id} ({rewrite.title})"}
    fusions = [without_taken(fusion, kept.built, [linear], titles) for fusion in kept.fusions]
    return replace(kept, rewrites=rewrites, fusions=fusions, linears=(*kept.linears, linear))


def find_places(
    bench: Bench, fusions: Sequence[PlannedFusion], rewrite: EpilogueRewrite = GEMM_EPILOGUE, *, fast_math: bool = False
) -> tuple[list[Placed], list[str]]:
    """Return where an epilogue could compute an activation, region by region, and why others were left alone.

    Args:
        bench: over the graphs as they are now.
        fusions: what kernels compute in them.
        rewrite: finds the sites.
        fast_math: take one GELU for the other, in 16 bits.
    """
    placed, refusals = [], []
    pairs = [(one.match.kernel, *pair) for one in fusions for pair in zip(one.chain.sites, one.sites, strict=True)]
    chains = [(kernel if lowered.outputs == site.op_indices[-1:] else "", site.op_indices) for kernel, site, lowered in pairs]
    reads = {lowered.outputs[-1]: lowered.given for _, _, lowered in pairs}
    for region, index_of in zip(bench.live.regions, bench.index_of, strict=True):
        node_at = {index: node for node, index in index_of.items()}
        mine = [(kernel, tuple(node_at[index] for index in indices)) for kernel, indices in chains if indices[0] in node_at]
        device = "cuda" if bench.on_cuda else "cpu"
        sites, reasons = rewrite.find(region.graph.graph, mine, device, fast_math=fast_math)
        refusals += reasons
        for site in sites:
            members, inputs = (tuple(index_of[node] for node in nodes) for nodes in (site.members, site.operands))
            if reads.get(members[-1], members[:1]) != members[:1]:
                continue
            own = own_classes(region, site.operands)
            if own:
                refusals.append(f"what it reads is a {min(own)}, whose own kernels may have no such epilogue")
                continue
            placed.append(Placed(place=Place(region=region.index, members=members, inputs=inputs), call=site.call()))
    return placed, refusals


def check(bench: Bench, found: Sequence[Placed], *, fast_math: bool = False, tolerance: Tolerance | None = None) -> Numerics:
    """Compare the calls with the ops they replace: on every place's own tensors, and the first on random rows."""
    sites = [(*original_of(bench, one.place), one.call) for one in found]
    first, own, call = sites[0]
    fresh = [[*random_like(own[:1], number, scale), *own[1:]] for number, scale in enumerate(SCALES)]
    trials = [*((chain, call, roots) for chain, roots, call in sites), *((first, call, roots) for roots in fresh)]
    text = f"the own tensors of {len(sites)} sites; the first one's weights and random rows ×2, ×32 and ×0.001 in magnitude"
    numerics = check_calls(trials, inputs=f"{text}; the worst is shown", fast_math=fast_math, tolerance=tolerance)
    return with_special_rows(numerics, first, call, own, rows=(0,), fast_math=fast_math, tolerance=tolerance)


def check_first(
    bench: Bench, found: Sequence[Placed], *, fast_math: bool = False, tolerance: Tolerance | None = None
) -> Numerics:
    """Compare calls that passed :func:`check` before with the ops: on a place's own tensors and one set of special rows."""
    chain, roots = original_of(bench, found[0].place)
    calls = [(chain, found[0].call, roots)]
    numerics = check_calls(calls, inputs="the first site's own tensors", fast_math=fast_math, tolerance=tolerance)
    return with_special_rows(
        numerics, chain, found[0].call, roots, rows=(0,), most_runs=1, fast_math=fast_math, tolerance=tolerance
    )


def built_of(found: Sequence[Placed]) -> BuiltLinear:
    """Return the calls as they go into graphs."""
    sites = tuple(
        SiteRewrite(
            fusion_id=GEMM_EPILOGUE.id,
            members=one.place.members,
            inputs=one.place.inputs,
            outputs=one.place.members[-1:],
            call=one.call,
        )
        for one in found
    )
    return BuiltLinear(id=GEMM_EPILOGUE.id, sites=sites)
