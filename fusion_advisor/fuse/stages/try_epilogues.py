"""Activations in the epilogue of the GEMM that they follow: cuBLAS computes what the model or a kernel launches for itself.

Every place is checked on its own tensors against the ops that it replaces; all are timed in the step on top of all that was kept,
and alone against what the step has in their places. What was a kernel of its own until then (a ``gelu_tanh``) is part of a
GEMM's; its row says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.rebind import ON_TOP, Kept, not_replaced
from fusion_advisor.fuse.decide.session import Bench, step_of
from fusion_advisor.fuse.decide.step_runner import StepRunner
from fusion_advisor.fuse.passes.registry import kept_passes, row_of
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.rewrite.record import EpilogueRewrite
from fusion_advisor.fuse.stages.epilogue_sites import Placed, built_of, check, find_places
from fusion_advisor.fuse.stages.gemm_sites import observe_together, ran_out, why_no_room, without_taken
from fusion_advisor.records import Numerics, Status
from fusion_advisor.verify.check_chain import why_wrong


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
