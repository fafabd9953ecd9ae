"""Counters of all layers in one launch: each layer of a static KV cache counts its own tokens, in a tensor of one element.

So every layer adds the count to its positions and then moves the count on: two launches that take longer to start than to run, 56
for Qwen2.5-7B's 28 layers. The counts are separate tensors that nothing in the graph shows to be equal, so they cannot be shared;
but the additions do not depend on each other, and ``foreach`` ops do them all in one launch. They move up to where the first one
stands, which is right as long as nobody writes to what they read on the way (or, where they write, reads it).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion_advisor.capture.graph.fx_nodes import storages, written_storages
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.rewrite.record import PassRewrite
from fusion_advisor.runtime.torch_internals import aten_ops

MOST_ELEMENTS = 64
"""Above, an addition is no counter's: it has work of its own to do, and moving it up keeps its result in memory for long."""

_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor


def batch_counters(graph: Graph, _region: Region, _constants: dict[str, torch.Tensor]) -> int:
    """Put additions of small integer tensors together; returns how many launches are saved.

    Sums come first: what a layer reads of its count is then read before any count has moved on.
    """
    saved = 0
    for batch in _batches(graph, _ADD):
        _add_together(graph, batch)
        saved += len(batch) - 1
    for batch in _batches(graph, _ADD_IN_PLACE):
        _add_in_place_together(graph, batch)
        saved += len(batch) - 1
    return saved


def _batches(graph: Graph, target: Any) -> list[list[Node]]:
    """Return ops that can be done where the first of them stands, at least two together."""
    open_: dict[Any, list[Node]] = {}
    done: list[list[Node]] = []
    so_far = _SoFar()
    for number, node in enumerate(graph.nodes):
        so_far.position[node] = number
        kind = _kind(node, target)
        if kind is not None:
            batch = open_.get(kind)
            if batch is not None and _can_join(node, so_far.position[batch[0]], so_far):
                batch.append(node)
            else:
                open_[kind] = [node]
                done.append(open_[kind])
        so_far.read.update((key, number) for source in node.all_input_nodes for key in storages(source))
        so_far.written.update((key, number) for key in written_storages(node))
    return [batch for batch in done if len(batch) > 1]


@dataclass(slots=True)
class _SoFar:
    """Where, in the part of a graph that was walked, each node stands and each storage was read and written last."""

    position: dict[Node, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)


def _kind(node: Node, target: Any) -> tuple[Any, ...] | None:
    """Return what must be equal for two additions to go together; None for what is no such addition."""
    if node.target is not target or node.kwargs:
        return None
    value, (left, right) = node.meta["val"], node.args[:2]
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool or value.numel() > MOST_ELEMENTS:
        return None
    layout = (value.dtype, value.device, value.numel())
    if target is _ADD_IN_PLACE:
        return (*layout, right) if isinstance(left, Node) and type(right) is int and value.is_contiguous() else None
    operands = [operand.meta["val"] for operand in (left, right) if isinstance(operand, Node)]
    is_plain = len(operands) == 2 and all((own.dtype, own.device, own.numel()) == layout for own in operands)
    return layout if is_plain and all(own.is_contiguous() for own in operands) else None


def _can_join(node: Node, first: int, so_far: _SoFar) -> bool:
    """Whether an addition gives the same at the place ``first``, and nothing between there and here notices."""
    if not all(so_far.position[source] < first or _is_movable(source) for source in node.all_input_nodes):
        return False
    own = {key for source in node.all_input_nodes for key in storages(source)}
    return all(so_far.written.get(key, -1) < first for key in own) and all(
        so_far.read.get(key, -1) < first for key in written_storages(node)
    )


def _is_movable(node: Node) -> bool:
    """Whether a node needs nothing that comes before it: a stored tensor, or an op that makes one from plain numbers."""
    if node.op == "get_attr":
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.all_input_nodes:
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags


def _add_together(graph: Graph, batch: Sequence[Node]) -> None:
    first = batch[0]
    _move_sources(batch)
    with graph.inserting_before(first):
        lefts, rights = ([_viewed(graph, node, place) for node in batch] for place in (0, 1))
        call = graph.call_function(aten_ops.ADD_MANY, (lefts, rights))
        call.meta = {**_origin(first), "val": [node.meta["val"] for node in batch]}
        for number, node in enumerate(batch):
            item = graph.call_function(operator.getitem, (call, number))
            item.meta = dict(node.meta)
            node.replace_all_uses_with(item)
    for node in batch:
        graph.erase_node(node)


def _add_in_place_together(graph: Graph, batch: Sequence[Node]) -> None:
    first = batch[0]
    _move_sources(batch)
    with graph.inserting_before(first):
        call = graph.call_function(aten_ops.ADD_MANY_IN_PLACE, ([node.args[0] for node in batch], first.args[1]))
        call.meta = {**_origin(first), "val": None}
    for node in batch:
        source = node.args[0]
        assert isinstance(source, Node)
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _move_sources(batch: Sequence[Node]) -> None:
    earlier = set()
    for node in batch[0].graph.nodes:
        if node is batch[0]:
            break
        earlier.add(node)
    for source in dict.fromkeys(source for node in batch for source in node.all_input_nodes):
        if source not in earlier:
            batch[0].prepend(source)


def _viewed(graph: Graph, node: Node, place: int) -> Node:
    """Return an operand in the shape of the sum: the fast path wants equal shapes, and broadcasting one element is a view."""
    source, shape = node.args[place], node.meta["val"].shape
    assert isinstance(source, Node)
    if source.meta["val"].shape == shape:
        return source
    view = graph.call_function(torch.ops.aten.view.default, (source, list(shape)))
    view.meta = {**_origin(node), "val": source.meta["val"].view(shape)}
    return view


def _origin(node: Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}


BATCH_COUNTERS = PassRewrite(id="batch-counters", title="batched counters", apply=batch_counters)
