"""Constant folding: what depends on no input of the model is computed once, when the graph is rewritten.

In transformers' decoders that is the causal mask and the position table, rebuilt at every step by some forty small kernels.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion_advisor.capture.graph import Region, storages, written_storages


def fold_constants(graph: Graph, _region: Region, constants: dict[str, torch.Tensor]) -> int:
    """Replace every value that depends on no placeholder by a stored tensor.

    Args:
        graph: rewritten in place.
        constants: gets one tensor per folded value, under the name its ``get_attr`` node uses.

    Returns:
        How many ops are no longer run.
    """
    foldable = foldable_nodes(graph)
    frontier = [node for node in foldable if any(user not in foldable for user in node.users) and _is_single_tensor(node)]
    values = evaluate(frontier)
    for node in frontier:
        name = f"folded_{len(constants)}"
        constants[name] = values[node]
        with graph.inserting_before(node):
            stored = graph.get_attr(name)
        stored.meta = dict(node.meta)
        node.replace_all_uses_with(stored, delete_user_cb=lambda user: user not in foldable)
    return len(foldable)


def foldable_nodes(graph: Graph) -> dict[Node, None]:
    """Return, in order, the ops that depend on no placeholder, draw nothing at random, and own no memory that others may change.

    A stored tensor outlives the call: what the graph writes to (also through a view), or what the caller is given and may write
    to, would differ at the next call.
    """
    shared = {key for node in graph.nodes for key in written_storages(node)}
    shared |= {key for node in graph.nodes if node.op == "output" for source in node.all_input_nodes for key in storages(source)}
    found: dict[Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not _is_pure(node) or shared & set(storages(node)):
            continue
        if all(source in found for source in node.all_input_nodes):
            found[node] = None
    return found


def evaluate(nodes: list[Node]) -> dict[Node, Any]:
    """Run the ops that ``nodes`` need (none of which depends on a placeholder) and return their values."""
    values: dict[Node, Any] = {}

    def value_of(node: Node) -> Any:
        if node not in values:
            arguments = torch.fx.node.map_arg(node.args, value_of)
            keywords = torch.fx.node.map_arg(node.kwargs, value_of)
            assert callable(node.target)
            values[node] = node.target(*arguments, **keywords)
        return values[node]

    with torch.no_grad():
        return {node: value_of(node) for node in nodes}


def _is_single_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_pure(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return "fusion_id" in node.meta
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags
