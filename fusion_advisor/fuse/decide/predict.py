"""Expected savings of rewrites, for comparison with the measured ones.

A chain costs the step its kernels' time as traced in place, and for each launch what the step takes beyond its kernels: that is
measured in the same run, as the captured step less the sum of its kernels, per launch (0.2 to 0.9 µs on an H200). It is never
more than one of the smallest kernels takes from its start to the next one's start: where it would be, the step ran at other
clocks than the trace did. The kernel's own part: :mod:`fusion_advisor.fuse.prediction.saving`.

All of it counts in full, for where the power limit would hold the step down it is timed after rests. Back to back the step
would feel less of it: while a copy runs, the device saves what lets the GEMMs run faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fusion_advisor.capture.graph.split_bias import LAUNCHES_OF
from fusion_advisor.fuse.decide.alone import savings_alone
from fusion_advisor.fuse.decide.session import Bench, Variant
from fusion_advisor.fuse.passes.registry import PASSES, row_of
from fusion_advisor.fuse.prediction.saving import chain_saving_ns, most_saving_ns
from fusion_advisor.fuse.rewrite.price import PassEffect
from fusion_advisor.records import Capture, Chain, Fusion, GraphRewrite, Launch, Status
from fusion_advisor.timing.interleaving import Difference


def launch_cost_ns(launches: Sequence[Launch], step_ns: int, rewrites: Iterable[GraphRewrite], *, most_ns: int) -> int:
    """Return the cost of a launch without its kernel; 0 where the step was not timed or takes no longer than its kernels.

    Args:
        launches: of the captured step, as traced: with the biases of small GEMMs written out.
        step_ns: the step without any rewrite, these biases in their GEMMs, timed without a profiler.
        rewrites: that were timed on it.
        most_ns: what the smallest kernel takes with its launch.
    """
    if not launches or not step_ns:
        return 0
    step_ns += sum(row.step_delta_ns or 0 for row in rewrites if row.id in PASSES and PASSES[row.id].is_in_trace)
    kernels_ns = sum(launch.duration_ns for launch in launches)
    return min(max(0, round((step_ns - kernels_ns) / len(launches))), most_ns)


def price_fusions(fusions: Iterable[Fusion], chains: Iterable[Chain], cost_ns: int) -> list[Fusion]:
    """Return fusions with what they were expected to save; those that were not timed alone stay as they are.

    Args:
        fusions: of a run.
        chains: that they stand for.
        cost_ns: from :func:`launch_cost_ns`.
    """
    by_id = {chain.id: chain for chain in chains}
    return [_priced(fusion, by_id, cost_ns) for fusion in fusions]


def _priced(fusion: Fusion, chains: Mapping[str, Chain], cost_ns: int) -> Fusion:
    chain = chains.get(fusion.chain_id)
    saving_ns = None if chain is None else chain_saving_ns(fusion, chain, cost_ns)
    return fusion if saving_ns is None else replace(fusion, predicted_saving_ns=saving_ns)


def estimates(
    fusions: Iterable[Fusion],
    chains: Mapping[str, Chain],
    passes: Sequence[str],
    bench: Bench,
    capture: Capture,
    confidence: float,
) -> dict[str, Difference]:
    """Return about what rewrites change in a step, before any is timed in it; ``low_ns`` is the most that each may save.

    A launch is counted with the cost of the smallest kernel's, the most that it has (:func:`launch_cost_ns`), and none stays. So
    no rewrite is left out of the step's timing by a low estimate.

    Args:
        fusions: those that were timed alone are estimated.
        chains: by id, that they stand for.
        passes: ids of graph passes, in the order that they are stacked; what the trace does not show is left out.
        bench: over the graphs as captured.
        capture: whose ops the bench describes.
        confidence: of the intervals of a kernel's own times.
    """
    cost_ns = capture.bandwidth.launch_ns
    timed = [fusion for fusion in fusions if fusion.chain_id in chains and fusion.chain_after is not None]
    alone = savings_alone(timed, {name: chain.runs for name, chain in chains.items()}, confidence)
    found = {}
    for fusion in timed:
        saving_ns = most_saving_ns(fusion, chains[fusion.chain_id], cost_ns)
        own = alone.get(fusion.id)
        low_ns = min(-saving_ns, own.low_ns if own else 0)
        found[fusion.id] = Difference(median_ns=-saving_ns, low_ns=low_ns, high_ns=-saving_ns)
    rows = [replace(row_of(PASSES[name], status=Status.PLANNED, reason="", sites=1), step_delta_ns=0) for name in passes]
    for row in price_passes(rows, bench, capture, cost_ns):
        if row.predicted_saving_ns is not None:
            found[row.id] = Difference(
                median_ns=-row.predicted_saving_ns, low_ns=-row.predicted_saving_ns, high_ns=-row.predicted_saving_ns
            )
    return found


def price_passes(rewrites: Iterable[GraphRewrite], bench: Bench, capture: Capture, cost_ns: int) -> tuple[GraphRewrite, ...]:
    """Return rewrites, the timed graph passes among them with the saving that their records predict.

    A pass that was in place when the step was traced keeps the figure that it came with: the trace says nothing of it. What was
    in every step that was timed comes first, so that no other pass is credited with what it takes away.

    Args:
        rewrites: of a run.
        bench: over the graphs as captured.
        capture: whose ops the bench describes.
        cost_ns: from :func:`launch_cost_ns`.
    """
    rewrites = list(rewrites)
    placed = [row.id for row in rewrites if row.id in PASSES and row.step_delta_ns is None and row.status is Status.KEPT]
    # The trace had biases of GEMMs as ops of their own; without any pass they are in their GEMMs again.
    gone = removed_ops(bench, bench.with_passes(placed))
    priced = []
    for row in rewrites:
        rewrite = PASSES.get(row.id)
        if rewrite is None or row.step_delta_ns is None:
            priced.append(row)
            continue
        placed.append(row.id)
        variant = bench.with_passes(placed)
        now = removed_ops(bench, variant)
        effect = PassEffect(
            capture=capture, modules=variant.modules, index_of=bench.index_of, runs=bench.live.runs_of_regions(),
            removed=now, newly_removed=now - gone, sites=row.sites, launch_cost_ns=cost_ns,
        )  # fmt: skip
        gone = now
        priced.append(row if rewrite.is_in_trace else replace(row, predicted_saving_ns=rewrite.predict(effect)))
    return tuple(priced)


def removed_ops(bench: Bench, variant: Variant) -> set[int]:
    """Return the indices of the captured ops that a variant no longer runs."""
    removed: set[int] = set()
    for region, index_of, module in zip(bench.live.regions, bench.index_of, variant.modules, strict=True):
        left = {name for node in module.graph.nodes for name in (node.name, *node.meta.get(LAUNCHES_OF, ()))}
        removed |= {index_of[node] for node in region.graph.graph.nodes if node.name not in left}
    return removed
