"""The step with every kept rewrite against the same step on changed graphs: merged GEMMs, rows that nobody reads left out.

The ops after a changed op may have another layout or another size, so the kept kernels are bound to them and checked again, and
the whole step is timed on top of all rewrites that were kept.

The nodes of a chain have copies in the changed graph, but what they read may now be a slice of a wider tensor, so each site is
lowered again from the new layouts. Sites that had equal programs may differ then (the slice of k starts elsewhere than that of
q): one fusion becomes one per program, under the same id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.fx import Node

from fusion_advisor.capture.graph.tracer import LiveCapture
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.keep_rule import Decision, confirmed
from fusion_advisor.fuse.decide.session import Bench, BuiltFusion, BuiltLinear, step_of
from fusion_advisor.fuse.decide.step_runner import StepRunner
from fusion_advisor.fuse.decide.trial import try_fusion
from fusion_advisor.fuse.passes.in_trace import LAYOUTS
from fusion_advisor.fuse.passes.registry import kept_passes, row_of
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.plan import PlannedFusion
from fusion_advisor.fuse.rewrite.record import Rewrite
from fusion_advisor.fuse.rewrite.region_copy import ChangedRegion
from fusion_advisor.ir.dtypes import CannotLower
from fusion_advisor.ir.operand_names import named_like
from fusion_advisor.ir.program import Program
from fusion_advisor.lowering.lower import Lowered
from fusion_advisor.lowering.memo import lower_sites
from fusion_advisor.records import Fusion, GraphRewrite, RenderedKernel, Site, Status

ON_TOP = " (on top of all that was kept)"
"""Words of a verdict, after its times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The rewrites that stay, the bench whose graphs have them, and the bench whose graphs are as captured."""

    bench: Bench
    captured: Bench
    decision: Decision
    rewrites: tuple[GraphRewrite, ...]
    fusions: list[Fusion]
    built: list[BuiltFusion]
    linears: tuple[BuiltLinear, ...] = ()
    """Calls of linears with what is around them; where one stands, no fusion does."""


class CannotMove(Exception):
    """The step cannot be had on changed graphs; the text says which kernel or change cannot, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedStep:
    """A bench over changed graphs with the kept fusions on it."""

    bench: Bench
    built: list[BuiltFusion]
    kernels: dict[str, tuple[RenderedKernel, ...]]
    """Kernels on the changed graphs, by fusion id."""
    changed: int
    held_bytes: int


Move = Callable[[Bench, PlannedFusion, int], tuple[BuiltFusion, RenderedKernel]]


def mover(kept: Kept, options: ApplyOptions, kernel_dir: Path, *, suffix: str, instruments: Instruments = MEASURED) -> Move:
    """Return what builds and checks a fusion on a new layout, in the language that its kernel is written in.

    Args:
        kept: with the fusions as they are.
        options: whether kernels may approximate, and the user's limit on their errors.
        kernel_dir: folder of its source, which has the kernel of the layout before too.
        suffix: of its file's name.
        instruments: choose its launch parameters, and say what counts of what is wrong with it.
    """
    backends = {item.planned.id: item.kernel.backend for item in kept.built}

    def move(bench: Bench, planned: PlannedFusion, number: int) -> tuple[BuiltFusion, RenderedKernel]:
        named = replace(planned, id=f"{planned.id}_{suffix}{number}")
        trial = try_fusion(
            bench,
            named,
            backend=backends[planned.id],
            fast_math=options.fast_math,
            tolerance=options.tolerance,
            kernel_dir=kernel_dir,
            seed=number,
            is_timed=False,
            tune=instruments.tune,
            worst=instruments.worst,
        )
        if trial.built is None:
            raise CannotMove(f"{planned.id} on the new layout: {trial.fusion.reason}")
        return bench.install(planned, trial.built.kernel, trial.built.built), trial.built.kernel

    return move


def on_changed(bench: Bench, regions: Sequence[ChangedRegion], built: Sequence[BuiltFusion], move: Move) -> ChangedStep:
    """Bind fusions on changed graphs; those whose layouts did not change keep their kernels.

    Args:
        bench: over the graphs before the change.
        regions: copies of the bench's, changed.
        built: fusions of ``bench`` that stay.
        move: builds a fusion whose layout changed.

    Raises:
        CannotMove: a fusion cannot be had on the new layout.
    """
    new, moved = on_changed_graphs(bench, regions, [item.planned for item in built])
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
            raise CannotMove(f"{planned.id} on the new layout: {fresh.refusals[0]}")
        result.append(fresh)
    return ChangedStep(
        bench=new,
        built=result,
        kernels=kernels,
        changed=sum(one.changed for one in regions),
        held_bytes=sum(one.held_bytes for one in regions),
    )


def on_changed_graphs(
    bench: Bench, regions: Sequence[ChangedRegion], planned: Sequence[PlannedFusion]
) -> tuple[Bench, list[list[PlannedFusion]]]:
    """Find fusions in changed graphs; nothing is built.

    Args:
        bench: over the graphs before the change.
        regions: copies of the bench's, changed.
        planned: of ``bench``.

    Returns:
        A bench over the changed graphs, and for each fusion what it is there: one or more, where sites came to differ.

    Raises:
        CannotMove: a fusion is no single kernel on the new layout.
    """
    new, moved = changed_bench(bench, regions)
    found = []
    for one in planned:
        try:
            found.append(relocate(one, new, moved))
        except CannotLower as refusal:
            raise CannotMove(f"{one.id} on the new layout: {refusal.reason}") from refusal
    return new, found


def judged(
    kept: Kept,
    changed: ChangedStep,
    rewrite: Rewrite,
    *,
    words: str,
    options: ApplyOptions,
    budget_s: float,
    instruments: Instruments = MEASURED,
) -> Kept:
    """Time a changed step on top of what was kept.

    Args:
        kept: so far.
        changed: the same fusions on changed graphs.
        rewrite: that changed them.
        words: of its verdict, after its times.
        options: the keep rule's thresholds.
        budget_s: seconds for the timing.
        instruments: time the step and decide.

    Returns:
        The same with one more row, and on the changed graphs when they stay.
    """
    passes = kept_passes(kept.rewrites)
    before, after = step_of(kept.bench, kept.built, passes), step_of(changed.bench, changed.built, passes)
    runner = StepRunner(kept.bench)
    verdict = instruments.on_top(
        runner, before.run, after.run,
        name=rewrite.id, min_gain=options.min_gain, confidence=options.confidence, budget_s=budget_s,
        is_timed=options.is_timed,
    )  # fmt: skip
    reason = f"{verdict.reason}{ON_TOP if verdict.is_timed else ''}{words}"
    row = replace(
        row_of(rewrite, status=verdict.status, reason=reason, sites=changed.changed),
        step_delta_ns=verdict.step_delta_ns,
        step_delta_ci_ns=verdict.step_delta_ci_ns,
        held_bytes=changed.held_bytes if verdict.status is Status.KEPT else 0,
        predicted_saving_ns=instruments.saving_alone_ns(runner, before, after) if options.is_timed else None,
    )
    rewrites = (*kept.rewrites, row)
    if verdict.status is not Status.KEPT:
        return replace(kept, rewrites=rewrites)
    fusions = [
        replace(fusion, rendered=changed.kernels[fusion.id]) if fusion.id in changed.kernels else fusion
        for fusion in kept.fusions
    ]
    return replace(kept, bench=changed.bench, rewrites=rewrites, fusions=fusions, built=changed.built)


def confirmed_once(kept: Kept, *, is_timed: bool, budget_s: float) -> Kept:
    """Time the step with all that stays against the step without any rewrite, where no comparison before was of these two.

    Args:
        kept: all that stays.
        is_timed: False: a few rounds for the report.
        budget_s: seconds for the timing.
    """
    is_laid_out = not set(LAYOUTS).isdisjoint(kept_passes(kept.rewrites))  # in every step that was timed
    is_as_decided = kept.bench is kept.captured and not kept.linears and not is_laid_out and kept.decision.is_as_kept
    if is_as_decided and not (kept.bench.on_cuda and is_timed):
        return kept
    original = step_of(kept.captured, (), ())
    step = step_of(kept.bench, kept.built, kept_passes(kept.rewrites), kept.linears)
    runner = StepRunner(kept.bench)
    decision = confirmed(runner, kept.decision, original.run, step.run, budget_s=budget_s if is_timed else 0.0)
    runner.forget()
    return replace(kept, decision=decision)


def not_replaced(kept: Kept, rewrite: Rewrite, *, reason: str, sites: int) -> Kept:
    """Return the same with a row that says why a rewrite was not tried."""
    row = row_of(rewrite, status=Status.NOT_REPLACED, reason=reason, sites=sites)
    return replace(kept, rewrites=(*kept.rewrites, row))


def changed_bench(bench: Bench, changed: Sequence[ChangedRegion]) -> tuple[Bench, dict[int, int]]:
    """Return a bench over changed regions, and the new index of each op that is still there.

    Args:
        bench: over the regions that ``changed`` was made from.
        changed: one per region of the bench.
    """
    old = bench.live
    live = LiveCapture(
        regions=[one.region for one in changed], breaks=old.breaks, output=old.output, written=old.written, compiled=old.compiled,
        runs=old.runs, results=old.results,
    )  # fmt: skip
    new = Bench(live, on_cuda=bench.on_cuda, timer=bench.timer, rest=bench.rest, record=bench.record)
    moved: dict[int, int] = {}
    for one, before, after in zip(changed, bench.index_of, new.index_of, strict=True):
        moved.update(_moved(one.copies, before, after))
    return new, moved


def _moved(copies: Mapping[Node, Node], before: Mapping[Node, int], after: Mapping[Node, int]) -> dict[int, int]:
    return {before[old]: after[new] for old, new in copies.items() if new in after}


def relocate(planned: PlannedFusion, bench: Bench, moved: Mapping[int, int]) -> list[PlannedFusion]:
    """Return a fusion's sites in the changed graph, as one fusion per program.

    Args:
        planned: of the graph before merging.
        bench: over the changed regions.
        moved: from :func:`changed_bench`.

    Raises:
        CannotLower: a site is no single kernel in the new layout.
    """
    by_program: dict[Program, list[tuple[Site, Lowered]]] = {}
    members = [tuple(moved[index] for index in site.op_indices) for site in planned.chain.sites]
    outputs = [tuple(moved[index] for index in lowered.outputs) for lowered in planned.sites]
    found = lower_sites(bench.ops, list(zip(members, outputs, strict=True)), is_exact=planned.program.is_exact)
    for site, own, fresh in zip(planned.chain.sites, members, found, strict=True):
        program = named_like(fresh.program, planned.program)
        by_program.setdefault(program, []).append((replace(site, op_indices=own), replace(fresh, program=program)))
    return [
        replace(
            planned,
            chain=replace(planned.chain, sites=tuple(site for site, _ in pairs)),
            program=program,
            sites=tuple(lowered for _, lowered in pairs),
        )
        for program, pairs in by_program.items()
    ]
