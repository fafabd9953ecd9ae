"""Sums over rows as late as the row's own ops allow: the gradient of a norm's weight waits for that of the norm's input.

Both read the same tensors. Autograd computes the weight's gradient in the midst of the input's, and a chain's kernel runs before
the first op outside the chain that reads a result of it. So the input's gradient would be two kernels. Nothing waits for a
weight's gradient, so its ops move down to the next op that no chain takes, a product of matrices mostly. They go no further,
because what they read is kept until then. Nor do they pass the sums of another norm: eight norms and activations in a row, and no
product, would keep the gradients of all of them until the end.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.op_classes import base_name, class_of
from fusion_advisor.records import OpClass

_ATEN = torch.ops.aten
_LIGHT = (OpClass.POINTWISE, OpClass.REDUCTION, OpClass.VIEW)
_CASTS = (_ATEN._to_copy.default,)


def sink_column_sums(graph_module: GraphModule) -> GraphModule:
    """Move sums over leading dims, and what only they read, down to the next op that is no chain's; returns the graph.

    Args:
        graph_module: one of AOTAutograd's passes; it is changed.
    """
    nodes = list(graph_module.graph.nodes)
    for number, node in enumerate(nodes):
        below = _below(node) if _sums_columns(node) else None
        if below is None:
            continue
        moved = _above(below)
        read = _read_by(moved)
        barrier = next(one for one in nodes[number + 1 :] if not _is_light(one) or _is_of_others(one, read))
        for one in sorted(one for one in moved if one < barrier):  # as they stand now: what has sunk does not rise again
            barrier.prepend(one)
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module


def _is_light(node: Node) -> bool:
    if node.target is operator.getitem or node.target in _CASTS:
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return not node.target._schema.is_mutable and _class(node) in _LIGHT


def _sums_columns(node: Node) -> bool:
    if node.target is _ATEN.native_layer_norm_backward.default:
        mask = node.args[-1]
        return isinstance(mask, list | tuple) and not mask[0]
    if (
        node.target is not _ATEN.sum.dim_IntList
        or not isinstance(node.args[0], Node)
        or not isinstance(node.args[1], list | tuple)
    ):
        return False
    rank = node.args[0].meta["val"].dim()
    dims = sorted(int(dim) % rank for dim in node.args[1] if isinstance(dim, int)) if rank else []
    return 0 < len(dims) < rank and dims == list(range(len(dims)))


def _below(node: Node) -> set[Node] | None:
    """The op and all that is computed from it; None where that is more than a few light ops."""
    found, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output" or user in found:
                continue
            if not _is_light(user):
                return None
            found.add(user)
            waiting.append(user)
    return found


def _above(found: set[Node]) -> set[Node]:
    """With some ops also the pointwise ops and views that nothing else reads."""
    waiting = list(found)
    while waiting:
        for source in waiting.pop().all_input_nodes:
            is_own = source not in found and set(source.users) <= found
            if is_own and _is_light(source) and _class(source) is not OpClass.REDUCTION:
                found.add(source)
                waiting.append(source)
    return found


def _is_of_others(node: Node, read: set[Node]) -> bool:
    """Whether an op sums over rows, and over nothing that some other sums read."""
    below = _below(node) if _sums_columns(node) else None
    return below is not None and _read_by(_above(below)).isdisjoint(read)


def _read_by(found: set[Node]) -> set[Node]:
    """What some ops read of others."""
    return {source for node in found for source in node.all_input_nodes} - found


def _class(node: Node) -> OpClass:
    return class_of(base_name(str(node.target)))
