"""Places in which the epilogue of a GEMM computes the activation after it: found, checked, and as calls that go into graphs.

Nothing is timed here: ``try_epilogues`` does that, and a saved plan puts in again what it tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_advisor.fuse.decide.session import Bench, BuiltLinear
from fusion_advisor.fuse.passes.gemm_epilogue import GEMM_EPILOGUE
from fusion_advisor.fuse.plan.plan import PlannedFusion
from fusion_advisor.fuse.rewrite.graph_rewriter import SiteRewrite
from fusion_advisor.fuse.rewrite.record import EpilogueRewrite
from fusion_advisor.fuse.stages.gemm_sites import Place, original_of, own_classes
from fusion_advisor.records import Numerics, Tolerance
from fusion_advisor.verify.check_chain import SCALES, check_calls, random_like, with_special_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A call of cuBLAS and where it would stand."""

    place: Place
    call: Callable[..., Any]


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
