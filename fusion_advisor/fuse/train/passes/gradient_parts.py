"""Gradients of layer norm in two calls: the input's, which sums rows, and the weight's and bias's, which sum columns.

``native_layer_norm_backward`` returns all of them and reads memory twice for it, once along rows and once across. Each of the two
calls does one of these, so torch is as fast, and either can join a chain of its own.
"""

from __future__ import annotations

import contextlib
import operator

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.runtime.torch_internals import fake_mode

_BACKWARD = torch.ops.aten.native_layer_norm_backward.default
_MASK = 7
"""Position of the argument that says which gradients are wanted."""


def lay_gradients_as_in_eager(graph_module: GraphModule) -> GraphModule:
    """Give gradients of rows, and what reads them, the strides of eager; returns the graph.

    Torch traces the op with others, see ``fake_mode.laid_as_in_eager``. What cannot run on eager's strides keeps its trace.

    Args:
        graph_module: one of AOTAutograd's passes; it is changed.
    """
    relaid: set[Node] = set()
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or "val" not in node.meta:
            continue
        before = node.meta["val"]
        with contextlib.suppress(RuntimeError):
            if not relaid.isdisjoint(node.all_input_nodes):
                node.meta["val"] = fake_mode.fake_result(graph_module, node)
            elif node.target in fake_mode.CONTIGUOUS:
                node.meta["val"] = fake_mode.laid_as_in_eager(node, before, (), {})
        if node.meta["val"] is not before:
            relaid.add(node)
    return graph_module


def split_norm_gradients(graph_module: GraphModule) -> GraphModule:
    """Make two calls of each op of a graph that computes all gradients of a layer norm; returns the graph.

    Args:
        graph_module: one of AOTAutograd's passes; it is changed.
    """
    for node in graph_module.graph.find_nodes(op="call_function", target=_BACKWARD):
        mask = node.args[_MASK]
        assert isinstance(mask, list | tuple)
        parts = [user for user in node.users if user.target is operator.getitem]
        of_columns = [part for part in parts if part.args[1] != 0]
        if mask[0] and of_columns and len(of_columns) < len(parts) == len(node.users):
            _split(node, of_columns)
    graph_module.recompile()
    return graph_module


def _split(node: Node, of_columns: list[Node]) -> None:
    """Give some results a call of their own; each call returns what it is asked for and no tensor elsewhere."""
    mask, values = node.args[_MASK], node.meta["val"]
    assert isinstance(mask, list | tuple)
    with node.graph.inserting_after(node):
        other = node.graph.call_function(_BACKWARD, (*node.args[:_MASK], [False, *mask[1:]]))
    other.meta = {**node.meta, "val": (None, *values[1:])}
    node.args = (*node.args[:_MASK], [True, False, False])
    node.meta["val"] = (values[0], None, None)
    for part in of_columns:
        part.args = (other, part.args[1])
