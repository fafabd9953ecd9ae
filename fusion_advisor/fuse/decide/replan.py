"""Planned fusions on another layout: the same chains in a changed graph, lowered and bound again.

The nodes of a chain have copies in the changed graph, but what they read may now be a slice of a wider tensor, so each site is
lowered again from the new layouts. Sites that had equal programs may differ then (the slice of k starts elsewhere than that of
q): one fusion becomes one per program, under the same id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from fusion_advisor.capture.graph.tracer import LiveCapture
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.plan.plan import PlannedFusion
from fusion_advisor.fuse.rewrite.region_copy import ChangedRegion
from fusion_advisor.ir.operand_names import named_like
from fusion_advisor.ir.program import Program
from fusion_advisor.lowering.lower import Lowered
from fusion_advisor.lowering.memo import lower_sites
from fusion_advisor.records import Site


def changed_bench(bench: Bench, changed: Sequence[ChangedRegion]) -> tuple[Bench, dict[int, int]]:
    """Return a bench over changed regions, and the new index of each op that is still there.

    Args:
        bench: over the regions that ``changed`` was made from.
        changed: one per region of the bench.
    """
    old = bench.live
    live = LiveCapture(
        regions=[one.region for one in changed], breaks=old.breaks, output=old.output, written=old.written, compiled=old.compiled,
        runs=old.runs,
    )  # fmt: skip
    new = Bench(live, on_cuda=bench.on_cuda, timer=bench.timer)
    new.rest = bench.rest
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
