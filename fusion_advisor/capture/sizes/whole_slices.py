"""Slices that take all of an open size: torch leaves them out where it knows the size, and a graph of open sizes has them.

``keys[:, :, None]`` is one op in a graph of one size, and three in one of open sizes. Rewrites look for the one.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

_SLICE = torch.ops.aten.slice.Tensor
_END = 2**63 - 1


def drop_whole_slices(graph_module: GraphModule) -> None:
    """Take slices out of a graph that take all there is; one that the graph returns stays, for it is a tensor of its own.

    Args:
        graph_module: changed in place.
    """
    graph = graph_module.graph
    returned = set(next(node for node in graph.nodes if node.op == "output").all_input_nodes)
    for node in list(graph.nodes):
        if node.target is _SLICE and not node.kwargs and node not in returned and _takes_all(node):
            source = node.args[0]
            assert isinstance(source, Node)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    graph_module.recompile()


def _takes_all(node: Node) -> bool:
    given = dict(zip(("dim", "begin", "end", "step"), node.args[1:], strict=False))
    return given.get("begin") in (None, 0) and given.get("end") in (None, _END) and given.get("step") in (None, 1)
