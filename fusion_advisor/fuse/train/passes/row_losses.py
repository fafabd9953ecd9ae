"""The negative log-likelihood of each row, then their sum: a chain can join the first to the log-softmax that it reads.

``nll_loss_forward`` makes one number of all rows, so a kernel before it has to write the log-softmax: for GPT-2's 32,768 rows of
50,257 words 6.6 GB, of which it reads one number a row.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

_ATEN = torch.ops.aten
_LOSS = _ATEN.nll_loss_forward.default
_NONE, _MEAN = 0, 1
_ARGUMENTS = 5


def split_losses(graph_module: GraphModule) -> GraphModule:
    """Make a loss of each row, their sum and the number of rows that count of each ``nll_loss_forward``; returns the graph.

    Left alone are losses that are not reduced, that weigh their classes, whose input is no matrix, or is one of 16 bits, to which
    each row's loss would be rounded.

    Args:
        graph_module: one of AOTAutograd's passes; it is changed.
    """
    for node in graph_module.graph.find_nodes(op="call_function", target=_LOSS):
        if _is_split(node):
            _split(node)
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module


def _is_split(node: Node) -> bool:
    if len(node.args) != _ARGUMENTS or node.kwargs or any(user.target is not operator.getitem for user in node.users):
        return False
    source, _, weight, reduction, _ = node.args
    if not isinstance(source, Node) or weight is not None or reduction == _NONE:
        return False
    value = source.meta["val"]
    return value.dim() == 2 and value.dtype in (torch.float32, torch.float64)


def _split(node: Node) -> None:
    graph, (source, target, _, reduction, ignored) = node.graph, node.args
    assert isinstance(source, Node) and isinstance(target, Node)
    total, count = node.meta["val"]
    with graph.inserting_before(node):
        rows = _made(
            graph, node, total.new_empty(target.meta["val"].shape), _ATEN.nll_loss.default, source, target, None, 0, ignored
        )
        result = _made(graph, node, total, _ATEN.sum.default, rows)
        counts = _made(graph, node, torch.empty_like(target.meta["val"], dtype=torch.bool), _ATEN.ne.Scalar, target, ignored)
        number = _made(graph, node, total.new_empty((), dtype=torch.int64), _ATEN.sum.default, counts)
        counted = _made(graph, node, count, _ATEN._to_copy.default, number, dtype=count.dtype)
        if reduction == _MEAN:
            result = _made(graph, node, total, _ATEN.div.Tensor, result, counted)
    for part in list(node.users):
        part.replace_all_uses_with(result if part.args[1] == 0 else counted)
        graph.erase_node(part)
    graph.erase_node(node)


def _made(graph: Graph, like: Node, value: torch.Tensor, target: torch._ops.OpOverload, *args: Any, **named: Any) -> Node:
    node = graph.call_function(target, args, named)
    node.meta = {**like.meta, "val": value}
    node.meta.pop("tensor_meta", None)
    return node
