"""What rewrites were expected to save, to be held against what the step measured.

A chain costs the step its kernels' time as traced in place, and for each launch what the step takes beyond its kernels: that is
measured in the same run, as the captured step less the sum of its kernels, per launch (0.2 to 0.9 µs on an H200). It is never
more than one of the smallest kernels takes from its start to the next one's start: where it would be, the step ran at other
clocks than the trace did. A chain's kernel was timed alone, launches included.

All of it counts in full, for where the power limit would hold the step down it is timed after rests. Back to back the step
would feel less of it: while a copy runs, the device saves what lets the GEMMs run faster.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from fusion_advisor.capture.graph.split_bias import LAUNCHES_OF
from fusion_advisor.chains.trace_bytes import read_bytes
from fusion_advisor.fuse.decide.session import BIASES, PASSES, Bench, Variant
from fusion_advisor.fuse.passes.odd_width_gemm import OddRows
from fusion_advisor.records import Arg, Capture, Chain, Fusion, GraphRewrite, Launch, OpClass, OpNode, Ref, TensorMeta
from fusion_advisor.records.op_facts import PRODUCTS

_LINEAR = "aten.linear.default"
_PRODUCTS = {f"aten.{name}.default": place for name, place in PRODUCTS.items()}
"""Place of the left matrix; GPT-2's layers call ``addmm``."""
_CONVOLUTIONS = tuple(f"aten.conv{dims}d.default" for dims in (1, 2, 3))
_ATTENTION = "aten.scaled_dot_product_attention.default"
_MASKS = "drop_masks"
_PADS = "pad_linears"
_STORED = "store_odd_rows"
_PATCHES = "patches_as_gemm"
_SHARED_MASKS = "share_masks"
_GROUPS = "group_query_heads"


def launch_cost_ns(launches: Sequence[Launch], step_ns: int, rewrites: Iterable[GraphRewrite], *, most_ns: int) -> int:
    """Return what a launch costs beside its kernel; 0 where the step was not timed or takes no longer than its kernels.

    Args:
        launches: of the captured step, as traced: with the biases of small GEMMs written out.
        step_ns: the step without any rewrite, these biases in their GEMMs, timed without a profiler.
        rewrites: that were timed on it.
        most_ns: what the smallest kernel takes with its launch.
    """
    if not launches or not step_ns:
        return 0
    apart, _ = PASSES[BIASES]
    step_ns += sum(row.step_delta_ns or 0 for row in rewrites if row.name == apart)
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
    if chain is None or fusion.chain_after is None:
        return fusion
    after_ns = fusion.chain_after.median_ns * chain.runs
    return replace(fusion, predicted_saving_ns=max(0, chain.device_ns + chain.launches * cost_ns - after_ns))


def price_passes(rewrites: Iterable[GraphRewrite], bench: Bench, capture: Capture, cost_ns: int) -> tuple[GraphRewrite, ...]:
    """Return rewrites, the graph passes among them with the cost of the launches that they took away.

    Where a mask goes, attention is expected to run as long as eager's, which builds none, in as many launches. A padded GEMM, and
    one over patches, is expected to be as quick per multiplication as the quickest of the step's other products; the result of
    the first is copied once, what the second reads and gives once each. One that stores odd rows where they belong is expected to
    save that copy and to launch its products in its stead. What an op makes of a boolean mask, besides attention's own kernels,
    is expected to be made once. Where repeated KV heads go, attention of a single token, which does little more than read them,
    is expected to read so much less. Biases that stay apart keep the figure that they came with: how long the op with its bias
    takes is not in the trace.

    Args:
        rewrites: of a run.
        bench: over the graphs as captured.
        capture: whose ops the bench describes.
        cost_ns: from :func:`launch_cost_ns`.
    """
    by_title = {title: name for name, (title, _) in PASSES.items()}
    placed: list[str] = []
    # Biases of GEMMs, which the trace had apart, are in their GEMMs again without any pass.
    gone = removed_ops(bench, bench.build((), ()))
    priced = []
    for row in rewrites:
        name = by_title.get(row.name)
        if name is None or row.step_delta_ns is None:
            priced.append(row)
            continue
        placed.append(name)
        variant = bench.build((), placed)
        now = removed_ops(bench, variant)
        if name == BIASES:
            priced.append(row)
            gone = now
            continue
        saved = [launch for launch in capture.launches if launch.op_index in now - gone]
        saving_ns = sum(launch.duration_ns for launch in saved) + len(saved) * cost_ns
        if name == _GROUPS:
            saving_ns += _unread_ns(capture, bench, variant)
        if name == _SHARED_MASKS:
            saving_ns += _repeated_masks_ns(capture, now, row.sites, cost_ns)
        if name == _MASKS:
            saving_ns += _unmasked_saving_ns(capture, now, cost_ns)
        if name == _PADS:
            saving_ns = max(0, saving_ns - _padded_ns(capture, now - gone) - 2 * row.sites * cost_ns)
        if name == _STORED:
            saving_ns = max(0, saving_ns + _copies_ns(capture, bench, variant) - _more_launches(bench, variant) * cost_ns)
        if name == _PATCHES:
            saving_ns = max(0, saving_ns - _patched_ns(capture, now - gone) - 3 * row.sites * cost_ns)
        gone = now
        priced.append(replace(row, predicted_saving_ns=saving_ns))
    return tuple(priced)


def _unmasked_saving_ns(capture: Capture, removed: Collection[int], cost_ns: int) -> int:
    """What attention takes beyond eager's: with a mask the op copies that too, in kernels that are not attention's own."""
    ops = {op.index for op in capture.ops if op.target == _ATTENTION} - set(removed)
    traced = [launch for launch in capture.launches if launch.op_index in ops or launch.category == OpClass.ATTENTION]
    eager = [launch for launch in capture.eager_launches if launch.category == OpClass.ATTENTION]
    beyond_ns = sum(launch.duration_ns for launch in traced) - sum(launch.duration_ns for launch in eager)
    return max(0, beyond_ns + (len(traced) - len(eager)) * cost_ns)


def _unread_ns(capture: Capture, bench: Bench, variant: Variant) -> int:
    """What reading the copies of KV heads took, where each key meets one query of its head and no more."""
    unread_bytes = 0
    runs = bench.live.runs_of_regions()
    for module, index_of, often in zip(variant.modules, bench.index_of, runs, strict=True):
        index_at = {node.name: index for node, index in index_of.items()}
        for node in module.graph.nodes:
            index = index_at.get(node.name)
            if index is None or capture.ops[index].target != _ATTENTION:
                continue
            before = [_read(capture, value) for value in capture.ops[index].args[1:3]]
            after = [value.meta["val"] for value in node.args[1:3] if isinstance(value, Node)]
            query = _read(capture, next(iter(capture.ops[index].args), None))
            if query is not None and query.shape[-2] == 1:
                unread_bytes += often * sum(read_bytes(one) for one in before if one is not None)
                unread_bytes -= often * sum(int(one.nbytes) for one in after)
    return max(0, round(unread_bytes * 1e9 / capture.bandwidth.copy_bytes_per_s))


def _read(capture: Capture, value: Arg) -> TensorMeta | None:
    return capture.ops[value.index].outputs[0] if isinstance(value, Ref) else None


def _repeated_masks_ns(capture: Capture, removed: Collection[int], sites: int, cost_ns: int) -> int:
    """What attention with a boolean mask launches beside its own kernels, but for one call of those that share it."""
    boolean = {op.index for op in capture.ops if op.target == _ATTENTION and _reads_bool(capture, op)} - set(removed)
    beside = [launch for launch in capture.launches if launch.op_index in boolean and launch.category != OpClass.ATTENTION]
    return round(sum(launch.duration_ns + cost_ns for launch in beside) * (1 - 1 / max(sites, 1)))


def _reads_bool(capture: Capture, op: OpNode) -> bool:
    sources = [value for value in (*op.args, *(value for _, value in op.kwargs)) if isinstance(value, Ref)]
    return any(capture.ops[source.index].outputs[0].dtype == "bool" for source in sources)


def _padded_ns(capture: Capture, removed: Collection[int]) -> int:
    """What linears take once they are padded: their products at the best rate of the others, and a copy of their results."""
    padded = [op for op in capture.ops if op.target == _LINEAR and op.index in removed]
    copied_bytes = sum(2 * capture.runs_of(op) * read_bytes(op.outputs[0]) for op in padded)  # read and written
    products_ns = sum(_products(capture, op) for op in padded) * _ns_per_product(capture, removed)
    return round(products_ns + copied_bytes * 1e9 / capture.bandwidth.copy_bytes_per_s)


def _copies_ns(capture: Capture, bench: Bench, variant: Variant) -> int:
    """What the copies take that padded linears no longer need: each reads and writes a whole result."""
    copied_bytes = sum(2 * runs * int(node.meta["val"].nbytes) for node, _, runs in _stored(bench, variant))
    return round(copied_bytes * 1e9 / capture.bandwidth.copy_bytes_per_s)


def _more_launches(bench: Bench, variant: Variant) -> int:
    """How many more: products and the copy of a few columns, for one product and the copy of all of them."""
    return sum(runs * (call.launches - 2) for _, call, runs in _stored(bench, variant))


def _stored(bench: Bench, variant: Variant) -> list[tuple[Node, OddRows, int]]:
    """The linears that store odd rows where they belong, and how often each runs in a step."""
    return [
        (node, node.target, runs)
        for module, runs in zip(variant.modules, bench.live.runs_of_regions(), strict=True)
        for node in module.graph.nodes
        if isinstance(node.target, OddRows)
    ]


def _patched_ns(capture: Capture, removed: Collection[int]) -> int:
    """What convolutions over patches take as GEMMs: their products, and copies of what they read and give."""
    convolutions = [op for op in capture.ops if op.target in _CONVOLUTIONS and op.index in removed]
    copied_bytes, products = 0, 0
    for op in convolutions:
        picture, weight = (capture.ops[source.index].outputs[0] for source in op.args[:2] if isinstance(source, Ref))
        copied_bytes += 2 * capture.runs_of(op) * (read_bytes(picture) + read_bytes(op.outputs[0]))
        products += capture.runs_of(op) * math.prod(op.outputs[0].shape) * math.prod(weight.shape[1:])
    return round(products * _ns_per_product(capture, removed) + copied_bytes * 1e9 / capture.bandwidth.copy_bytes_per_s)


def _ns_per_product(capture: Capture, removed: Collection[int]) -> float:
    """Of the quickest product that stays."""
    took: dict[int, int] = {}
    for launch in capture.launches:
        if launch.op_index is not None:
            took[launch.op_index] = took.get(launch.op_index, 0) + launch.duration_ns
    left = [op for op in capture.ops if op.target in _PRODUCTS and took.get(op.index) and op.index not in removed]
    return min((took[op.index] / _products(capture, op) for op in left), default=0.0)


def _products(capture: Capture, op: OpNode) -> int:
    source = op.args[_PRODUCTS[op.target]]
    width = capture.ops[source.index].outputs[0].shape[-1] if isinstance(source, Ref) else 1
    return capture.runs_of(op) * math.prod(op.outputs[0].shape) * int(width)


def removed_ops(bench: Bench, variant: Variant) -> set[int]:
    """Return the indices of the captured ops that a variant no longer runs."""
    removed: set[int] = set()
    for region, index_of, module in zip(bench.live.regions, bench.index_of, variant.modules, strict=True):
        left = {name for node in module.graph.nodes for name in (node.name, *node.meta.get(LAUNCHES_OF, ()))}
        removed |= {index_of[node] for node in region.graph.graph.nodes if node.name not in left}
    return removed
