"""Unrolled recurrences as kernels, tried on top of all that was kept: each kind is built, checked, timed alone, then in the step.

A kind is what one kernel computes; the layers of a model are mostly one kind. Its kernel takes in the ops that prepare the steps.
The rows of fusions of these ops then say so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from fusion_advisor.codegen.common.interface import KernelBuildFailed
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.rebind import Kept
from fusion_advisor.fuse.decide.session import Bench, BuiltLinear, members_of
from fusion_advisor.fuse.decide.step_runner import StepRunner
from fusion_advisor.fuse.decide.trial import source_around
from fusion_advisor.fuse.decide.try_fusions import FASTEST
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.rewrite.scan_kernels import TITLE
from fusion_advisor.fuse.scans.sites import LeftOp
from fusion_advisor.fuse.stages.gemm_sites import compare_alone, observe_together, ran_out, why_no_room
from fusion_advisor.fuse.stages.scan_kernels import ScanKind, build, check, find_kinds, install, name_of, original_scan
from fusion_advisor.fuse.stages.try_linear_kernels import is_wanted, timed_on_top, with_kernels_of
from fusion_advisor.records import Fusion, OpClass, Receipt, Status
from fusion_advisor.verify.check_chain import why_wrong
from fusion_advisor.verify.subgraph_oracle import OriginalChain
from fusion_advisor.workload.device import fault_of


def place_scans(
    kept: Kept,
    options: ApplyOptions,
    progress: Progress,
    *,
    kernel_dir: Path,
    budget_s: float,
    instruments: Instruments = MEASURED,
) -> Kept:
    """Put kernels in place of unrolled recurrences where they pay on top of what was kept.

    Args:
        kept: what was decided without them.
        options: the keep rule's thresholds; ``only`` and ``skip`` name these kernels too.
        progress: gets a note for each finding.
        kernel_dir: where sources go.
        budget_s: seconds for the timing of all kinds.
        instruments: time the kernels and the step, and decide.

    Returns:
        The same with one more fusion for each kind of loop, and those that stay in ``linears``.
    """
    if not is_wanted(TITLE, options):
        return kept
    bench = kept.bench
    kinds, left = find_kinds(bench, members_of(kept.linears))
    rows = [_left_row(bench, names, reason, f"S{n}") for n, (reason, names) in enumerate(_by_reason(left), start=len(kinds) + 1)]
    for row in rows:
        progress.note(f"{row.id} {row.kernel}: {row.status}, {row.reason}")
    runner = StepRunner(bench)
    tried: list[Fusion] = []
    chosen: list[BuiltLinear] = []
    for number, kind in enumerate(kinds, start=1):
        progress.step(number - 1, len(kinds), f"S{number} {TITLE}: build, check, time")
        row, built = _row(bench, kind, f"S{number}"), None
        try:
            refusal = why_no_room(bench, kind.places, instruments)
            if refusal := refusal or observe_together(bench, kind.places, instruments):
                row = replace(row, status=Status.NOT_REPLACED, reason=refusal)
            else:
                row, built = _tried(bench, row, kind, options, kernel_dir, instruments, seed=number)
        except (RuntimeError, MemoryError) as error:
            row = replace(row, status=Status.NOT_REPLACED, reason=ran_out(error))
        bench.values.clear()
        if built is not None:
            row = timed_on_top(kept, row, chosen, built, runner, options, instruments, budget_s=budget_s / len(kinds))
            chosen += [built] if row.status is Status.KEPT else []
        progress.note(f"{row.id} {row.kernel}: {row.status}, {row.reason}")
        tried.append(row)
    return with_kernels_of(kept, [*tried, *rows], chosen)


def _tried(
    bench: Bench, row: Fusion, kind: ScanKind, options: ApplyOptions, kernel_dir: Path, instruments: Instruments, *, seed: int
) -> tuple[Fusion, BuiltLinear | None]:
    surprise = next((bench.surprises[i] for place in kind.places for i in place.inputs if i in bench.surprises), "")
    if surprise := instruments.worst(surprise):
        return replace(row, status=Status.NOT_REPLACED, reason=surprise), None
    backend = None if options.backend == FASTEST else options.backend
    try:
        made = build(kind, bench.device, kernel_dir / f"{row.id}_{TITLE}", backend=backend)
        row = replace(row, rendered=(made.kernel,))
        row = replace(row, numerics=check(bench, kind, made, seed=seed, tolerance=options.tolerance))
    except KernelBuildFailed as failure:
        return replace(row, status=Status.BUILD_FAILED, reason=instruments.worst(str(failure))), None
    except torch.AcceleratorError as error:
        raise fault_of(TITLE, error) from error
    except (RuntimeError, MemoryError) as error:  # the other ranks wait for an answer
        return replace(row, status=Status.NOT_REPLACED, reason=instruments.worst(ran_out(error))), None
    numerics = row.numerics
    assert numerics is not None
    if problem := instruments.worst("" if numerics.is_passed else why_wrong(numerics, options.tolerance)):
        return replace(row, status=Status.WRONG_NUMBERS, reason=problem), None
    built = install(bench, kind, made, name=row.id)
    if not options.is_timed:
        return row, built
    sites = [original_scan(bench, place) for place in kind.places]

    def original(chain: OriginalChain) -> Callable[..., object]:
        return lambda *roots: chain.run(roots)

    before, after = compare_alone(
        [original(chain) for chain, _ in sites], [site.call for site in built.sites], [roots for _, roots in sites], bench,
        instruments,
    )  # fmt: skip
    row = replace(row, chain_before=before, chain_after=after)
    if after.ci_low_ns >= before.ci_high_ns:
        reason = f"alone it takes {after.median_ns / 1e3:.1f} µs, the original ops {before.median_ns / 1e3:.1f} µs"
        return replace(row, status=Status.SLOWER, reason=reason), None
    return row, built


def _row(bench: Bench, kind: ScanKind, name: str) -> Fusion:
    loops = [bench.index_of[place.region][site.loop] for site, place in zip(kind.sites, kind.places, strict=True)]
    runs = bench.live.runs_of_regions()
    ops = [bench.ops[index] for place in kind.places for index in place.members]
    launches = sum(runs[op.region] for op in ops if op.op_class not in (OpClass.VIEW, OpClass.INPUT))
    return _planned(bench, loops, name, launches=launches, kernel_bytes=kind.recurrence.moved_bytes)


def _planned(bench: Bench, loops: list[int], name: str, *, launches: int, kernel_bytes: int | None) -> Fusion:
    first = bench.ops[loops[0]]
    return Fusion(
        id=name, chain_id="", kernel=TITLE, status=Status.PLANNED, reason="",
        receipt=Receipt(
            sites_found=len(loops), sites_matched=len(loops), sites_replaced=0, launches_before=launches, launches_after=0
        ),
        original_source=source_around(first.source_file, first.source_line),
        kernel_bytes=kernel_bytes,
    )  # fmt: skip


def _by_reason(left: list[LeftOp]) -> list[tuple[str, list[LeftOp]]]:
    found: dict[tuple[str, str], list[LeftOp]] = {}
    for one in left:
        found.setdefault((name_of(one.loop), one.reason), []).append(one)
    return [(reason, ops) for (_, reason), ops in found.items()]


def _left_row(bench: Bench, left: list[LeftOp], reason: str, name: str) -> Fusion:
    """Return the row of loops that stay op by op."""
    index_of = {node: index for one in bench.index_of for node, index in one.items()}
    row = _planned(bench, [index_of[one.loop] for one in left], name, launches=len(left), kernel_bytes=None)
    return replace(row, status=Status.NOT_REPLACED, reason=reason)
