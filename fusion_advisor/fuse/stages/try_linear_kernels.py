"""Linears as hand-written kernels, tried last: on few rows norm, bias, gate and residual go into them, on many the gate alone.

Every kind of site (one kernel, all its layers) is built, checked on every site's own tensors, timed alone against the ops that it
replaces, and then in the step on top of all that was kept before it; one that does not pay is out before the next is timed. It
takes the place of fused chains (the norm of an ``add_rmsnorm``, a ``swiglu``), whose rows say so: the step that it is compared
with has them, and cuBLAS. Sites with a norm come first, because a residual that is added in its linear leaves behind a norm that
needs another kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fusion_advisor.codegen.common.interface import KernelBuildFailed
from fusion_advisor.codegen.gemm.problem import MOST_ROWS, GemvProblem
from fusion_advisor.codegen.gemm.registry import FEW_ROWS_ONLY
from fusion_advisor.fuse.decide.alone import far_too_little
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.rebind import Kept
from fusion_advisor.fuse.decide.session import Bench, BuiltLinear, members_of, step_of
from fusion_advisor.fuse.decide.step_runner import StepRunner
from fusion_advisor.fuse.decide.trial import source_around
from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.fuse.passes.registry import kept_passes
from fusion_advisor.fuse.plan.options import ApplyOptions, fits
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.stages.gemm_sites import (
    Place,
    compare_alone,
    observe_together,
    original_of,
    ran_out,
    why_no_room,
    without_taken,
)
from fusion_advisor.fuse.stages.linear_kernels import LinearKernels, Make, check, header_of, install
from fusion_advisor.fuse.stages.linear_kinds import Kind, find_kinds
from fusion_advisor.records import Fusion, OpClass, Receipt, Status, Timing
from fusion_advisor.timing.interleaving import Difference
from fusion_advisor.verify.check_chain import why_wrong
from fusion_advisor.verify.subgraph_oracle import OriginalChain
from fusion_advisor.workload.device import fault_of


def place_gemvs(
    kept: Kept,
    options: ApplyOptions,
    progress: Progress,
    *,
    budget_s: float,
    kernels: LinearKernels | None,
    instruments: Instruments = MEASURED,
) -> Kept:
    """Put GEMV kernels where they pay on top of what was kept.

    Args:
        kept: what was decided without them.
        options: the keep rule's thresholds; ``only`` and ``skip`` name these kernels too.
        progress: gets a note for each finding.
        budget_s: seconds for the timing of all kinds.
        kernels: from :func:`linear_kernels`; None where there is no device for them.
        instruments: time the kernels and the step, and decide.

    Returns:
        The same with one more fusion for each kind of site, and those that stay in ``linears``.
    """
    bench = kept.bench
    kinds = [] if kernels is None else [
        kind for kind in find_kinds(bench, members_of(one for one in kept.linears if one.meets_ranks))
        if is_wanted(kind.title, options) and _has_kernel(kind.problem, bench, options, kernels)
    ]  # fmt: skip
    if kernels is None or not kinds:
        return kept
    refusals, seen = _refused(bench, kinds, instruments)
    if problem := observe_together(bench, seen, instruments):
        refusals = [problem] * len(kinds)
    runner = StepRunner(bench)
    rows: list[Fusion] = []
    chosen: list[BuiltLinear] = []
    for number, (kind, refusal) in enumerate(zip(kinds, refusals, strict=True), start=1):
        progress.step(number - 1, len(kinds), f"G{number} {kind.title}: build, check, time")
        row, built = _row(bench, kind, f"G{number}"), None
        if refusal is not None:
            row = replace(row, status=Status.NOT_REPLACED, reason=refusal)
        else:
            try:
                row, built = _tried(bench, row, kind, kernels.make, options, instruments, seed=number)
            except (RuntimeError, MemoryError) as error:
                row = replace(row, status=Status.NOT_REPLACED, reason=ran_out(error))
        if built is not None:
            row = timed_on_top(kept, row, chosen, built, runner, options, instruments, budget_s=budget_s / len(kinds))
            chosen += [built] if row.status is Status.KEPT else []
        progress.note(f"{row.id} {row.kernel}: {row.status}, {row.reason}")
        rows.append(row)
    bench.values.clear()  # activations of every layer
    return with_kernels_of(kept, rows, chosen)


def timed_on_top(
    kept: Kept,
    row: Fusion,
    chosen: Sequence[BuiltLinear],
    built: BuiltLinear,
    runner: StepRunner,
    options: ApplyOptions,
    instruments: Instruments,
    *,
    budget_s: float,
) -> Fusion:
    """Return a kernel's row with its verdict, on top of what was kept and of the kernels that were chosen before it.

    Args:
        kept: so far.
        row: of the kernel, whose numbers passed.
        chosen: kernels of the same rewrite that stay.
        built: the kernel.
        runner: runs the step.
        options: the keep rule's thresholds.
        instruments: time the step and decide.
        budget_s: seconds for the timing.
    """
    passes = kept_passes(kept.rewrites)
    before = step_of(kept.bench, kept.built, passes, [*kept.linears, *chosen])
    after = step_of(kept.bench, kept.built, passes, [*kept.linears, *chosen, built])
    alone = instruments.change_alone(runner, before, after, options.confidence) if options.is_timed else None
    verdict = None
    if runner.on_cuda and options.effort != "thorough":
        verdict = far_too_little(built.id, alone, step_ns=kept.decision.after.median_ns, min_gain=options.min_gain)
    verdict = verdict or instruments.on_top(
        runner, before.run, after.run,
        name=built.id, min_gain=options.min_gain, confidence=options.confidence, budget_s=budget_s, is_timed=options.is_timed,
    )  # fmt: skip
    return _judged(row, verdict, alone)


def with_kernels_of(kept: Kept, rows: Sequence[Fusion], chosen: Sequence[BuiltLinear]) -> Kept:
    """Return what stays with these rows and kernels.

    Args:
        kept: so far.
        rows: of all kernels that were tried.
        chosen: those that stay.
    """
    titles = {row.id: f"{row.id} {row.kernel}" for row in rows}
    fusions = [without_taken(fusion, kept.built, chosen, titles) for fusion in kept.fusions]
    return replace(kept, fusions=[*fusions, *rows], linears=(*kept.linears, *chosen))


def _refused(bench: Bench, kinds: Sequence[Kind], instruments: Instruments) -> tuple[list[str | None], list[Place]]:
    """Return for each kind why it does not fit into memory together with the kinds before it, and the places of all that do."""
    refusals: list[str | None] = []
    seen: list[Place] = []
    for kind in kinds:
        refusals.append(why_no_room(bench, [*seen, *kind.places], instruments))
        seen += kind.places if refusals[-1] is None else ()
    return refusals, seen


def _tried(
    bench: Bench, row: Fusion, kind: Kind, make: Make, options: ApplyOptions, instruments: Instruments, *, seed: int
) -> tuple[Fusion, BuiltLinear | None]:
    surprise = next((bench.surprises[i] for place in kind.places for i in place.inputs if i in bench.surprises), "")
    if surprise := instruments.worst(surprise):
        return replace(row, status=Status.NOT_REPLACED, reason=surprise), None
    made, problem, wrong, failed = None, "", "", Status.BUILD_FAILED
    try:
        made = make(kind.problem, header_of(kind.title), f"{row.id}_{kind.title}")
        if isinstance(made, str):
            return replace(row, status=Status.SLOWER, reason=made), None
        row = replace(row, rendered=(made.kernel,))
        numerics = check(bench, kind, made, seed=seed, tolerance=options.tolerance)
        wrong = "" if numerics.is_passed else why_wrong(numerics, options.tolerance)
        row = replace(row, numerics=numerics)
    except KernelBuildFailed as failure:  # Triton and NVRTC compile at the first launch
        problem = str(failure)
    except torch.AcceleratorError as error:
        raise fault_of(kind.title, error) from error
    except (RuntimeError, MemoryError) as error:  # the other ranks wait for an answer
        problem, failed = ran_out(error), Status.NOT_REPLACED
    if problem := instruments.worst(problem):
        return replace(row, status=failed, reason=problem), None
    if wrong := instruments.worst(wrong):
        return replace(row, status=Status.WRONG_NUMBERS, reason=wrong), None
    assert made is not None and not isinstance(made, str)  # else there was a problem
    built = install(bench, kind, made, name=row.id)
    if not options.is_timed:
        return row, built
    before, after = _alone(bench, kind, built, instruments)
    row = replace(row, chain_before=before, chain_after=after)
    if after.ci_low_ns >= before.ci_high_ns:
        reason = f"alone it takes {after.median_ns / 1e3:.1f} µs, the original ops {before.median_ns / 1e3:.1f} µs"
        return replace(row, status=Status.SLOWER, reason=reason), None
    return row, built


def _alone(bench: Bench, kind: Kind, built: BuiltLinear, instruments: Instruments) -> tuple[Timing, Timing]:
    sites = [original_of(bench, place) for place in kind.places]

    def original(chain: OriginalChain) -> Callable[..., object]:
        return lambda *roots: chain.run(roots)

    return compare_alone(
        [original(chain) for chain, _ in sites],
        [site.call for site in built.sites],
        [roots for _, roots in sites],
        bench,
        instruments,
    )


def _row(bench: Bench, kind: Kind, name: str) -> Fusion:
    last = bench.ops[kind.places[0].members[-1]]
    runs = bench.live.runs_of_regions()
    ops = [bench.ops[index] for place in kind.places for index in place.members]
    launches = sum(runs[op.region] for op in ops if op.op_class not in (OpClass.VIEW, OpClass.INPUT))
    return Fusion(
        id=name,
        chain_id="",
        kernel=kind.title,
        status=Status.PLANNED,
        reason="",
        receipt=Receipt(
            sites_found=len(kind.places),
            sites_matched=len(kind.places),
            sites_replaced=0,
            launches_before=launches,
            launches_after=0,
        ),
        original_source=source_around(last.source_file, last.source_line),
        kernel_bytes=kind.problem.moved_bytes,
    )


def _judged(row: Fusion, verdict: Verdict, alone: Difference | None) -> Fusion:
    is_of_step = verdict.is_timed and not verdict.is_timed_alone
    return replace(
        row,
        status=verdict.status,
        reason=f"{verdict.reason} (timed last, on top of all that was kept)" if is_of_step else verdict.reason,
        is_timed_alone=verdict.is_timed_alone,
        step_delta_ns=verdict.step_delta_ns,
        step_delta_ci_ns=verdict.step_delta_ci_ns,
        predicted_saving_ns=None if alone is None else -alone.median_ns,
    )


def is_wanted(title: str, options: ApplyOptions) -> bool:
    """Return whether the options let a kernel of this name be tried."""
    only = options.only_kernels
    return (not only or fits(title, only)) and not fits(title, options.skipped_kernels)


def _has_kernel(problem: GemvProblem, bench: Bench, options: ApplyOptions, kernels: LinearKernels) -> bool:
    """Whether one may serve: for many rows there is none in Triton."""
    return kernels.is_served(problem, bench.device) and (problem.m <= MOST_ROWS or options.backend not in FEW_ROWS_ONLY)
