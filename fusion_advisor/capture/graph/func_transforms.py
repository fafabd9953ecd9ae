"""Replaces what dynamo traced under ``torch.vmap`` or another transform by the plain ops that it computes.

``torch.vmap``, ``torch.func.grad``, ``jvp`` and ``associative_scan`` (Mamba's scan) leave switches in dynamo's graph: one more
level of the transform, tensors put into it and taken out, and the ops in between as the transformed function calls them. Traced
above autograd, what is computed there is lost. So each such subgraph is traced by itself below autograd, where the transform has
made batched ops, or a backward pass, of every op; the ops of that trace take the place of the subgraph. Equal subgraphs are
traced once. A scan that dynamo left as one op (``combine_mode="pointwise"``, on a GPU) is written out in its levels likewise.

``torch.utils.checkpoint`` is one op that holds a graph. Without gradients nothing is computed again, and its graph's ops take its
place.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fusion_advisor.runtime.torch_internals import fx_trace, symbolic_sizes

_IN, _OUT = "_increment_nesting", "_decrement_nesting"
_LOADS = "lazy_load_decompositions"
_ORIGIN = ("nn_module_stack", "stack_trace", "source_fn_stack")


def without_transforms(graph_module: GraphModule) -> GraphModule:
    """Return a dynamo graph with plain ops in place of each subgraph under a transform; the graph itself where there is none.

    Args:
        graph_module: dynamo's, with the fake tensors that it was traced on (``example_value``).
    """
    if not any(_name(node).endswith(_IN) or _is_scan(node) for node in graph_module.graph.nodes):
        return graph_module
    plain = _Plain(graph_module)
    subgraph: list[Node] = []
    depth = 0
    for node in graph_module.graph.nodes:
        depth += _name(node).endswith(_IN) - _name(node).endswith(_OUT)
        if depth:
            subgraph.append(node)
        elif subgraph:
            plain.put([*subgraph, node])
            subgraph = []
        elif _is_scan(node):
            plain.put([node.args[0], node, *node.users])
        elif _name(node) != _LOADS and not _is_read_by_scans(node):
            plain.keep(node)
    return plain.finished()


def without_checkpoints(graph_module: GraphModule) -> GraphModule:
    """Return a dynamo graph with the ops inside its checkpoints in their places; the graph itself where it has none.

    Args:
        graph_module: dynamo's, of a call without gradients; it is not changed.
    """
    if not any(map(_is_checkpoint, graph_module.graph.nodes)):
        return graph_module
    graph = Graph()
    graph.output(_copied_into(graph, graph_module, "", {}))
    return GraphModule(graph_module, graph)


def _copied_into(graph: Graph, owner: GraphModule, path: str, copies: dict[Node, Any]) -> Any:
    """Append copies of a graph's ops, and of those in its checkpoints; returns what the graph returns.

    Args:
        graph: gets them.
        owner: of the ops.
        path: of the owner in the outermost graph; it ends in a dot.
        copies: of the owner's inputs, where they are no inputs of the outermost graph.
    """

    def copied(node: Node) -> Any:
        return copies[node]

    for node in owner.graph.nodes:
        if _is_checkpoint(node):
            body, *given = node.args
            inside = getattr(owner, str(body.target))
            inputs = inside.graph.find_nodes(op="placeholder")
            known = dict(zip(inputs, map_arg(given, copied), strict=True))
            copies[node] = _copied_into(graph, inside, f"{path}{body.target}.", known)
        elif node.target is operator.getitem and _is_checkpoint(node.args[0]):
            copies[node] = copies[node.args[0]][node.args[1]]
        elif node.op == "output":
            return map_arg(node.args[0], copied)
        elif node not in copies and not _is_read_by_checkpoints(node):
            copies[node] = graph.node_copy(node, copied)
            if path and node.op in ("get_attr", "call_module"):
                copies[node].target = f"{path}{node.target}"
    raise AssertionError("a graph without an output")


def _is_checkpoint(node: Node) -> bool:
    return node.op == "call_function" and str(node.target) == "tag_activation_checkpoint"


def _is_read_by_checkpoints(node: Node) -> bool:
    return node.op == "get_attr" and bool(node.users) and all(map(_is_checkpoint, node.users))


def _is_scan(node: Node) -> bool:
    """Whether it is a scan whose levels are not written out yet, with items of its result as its only users."""
    return fx_trace.is_associative_scan(node) and all(user.target is operator.getitem for user in node.users)


def _is_read_by_scans(node: Node) -> bool:
    return node.op == "get_attr" and bool(node.users) and all(map(_is_scan, node.users))


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


class _Plain:
    """Makes the graph without transforms.

    Args:
        owner: dynamo's graph, which has the attributes that its nodes name.
    """

    def __init__(self, owner: GraphModule) -> None:
        self._owner = owner
        self._graph = Graph()
        self._copies: dict[Node, Node] = {}
        self._traced: dict[Any, GraphModule] = {}
        self._held: dict[str, Any] = {}

    def keep(self, node: Node) -> None:
        """Append a node as it is, unless a subgraph had it already."""
        if node not in self._copies:
            self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)
            if node.op in ("get_attr", "call_module"):
                self._held[str(node.target)] = operator.attrgetter(str(node.target))(self._owner)

    def put(self, subgraph: Sequence[Node]) -> None:
        """Append the plain ops of a subgraph, and note which node has the value of each node that is read outside."""
        inside = set(subgraph)
        inputs = list(dict.fromkeys(source for node in subgraph for source in node.all_input_nodes if source not in inside))
        results = [node for node in subgraph if any(user not in inside for user in node.users)]
        key = _key(subgraph, inputs, results)
        if key not in self._traced:
            self._traced[key] = _trace(subgraph, inputs, results, self._owner)
        plain = self._traced[key]
        values: dict[Node, Node] = {}
        given = iter(inputs)
        for node in plain.graph.nodes:
            if node.op == "placeholder":
                values[node] = self._copies[next(given)]
            elif node.op == "output":
                self._copies.update((result, values[value]) for result, value in zip(results, node.args[0], strict=True))
            else:
                values[node] = self._copied(node, plain, values)
                values[node].meta.update({name: subgraph[0].meta[name] for name in _ORIGIN if name in subgraph[0].meta})

    def _copied(self, node: Node, plain: GraphModule, values: dict[Node, Node]) -> Node:
        copied = self._graph.node_copy(node, values.__getitem__)
        copied.meta = {"example_value": node.meta["val"]} if "val" in node.meta else {}
        if node.op == "get_attr":
            copied.target = f"_held_by_transform_{len(self._held)}"
            self._held[copied.target] = getattr(plain, str(node.target))
        return copied

    def finished(self) -> GraphModule:
        """Return the graph with all that was appended."""
        return GraphModule(self._held, self._graph)


def _key(subgraph: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node]) -> Any:
    """Return what is equal for subgraphs of the same ops on inputs of the same layouts."""
    numbers = {node: number for number, node in enumerate((*inputs, *subgraph))}
    code = tuple(
        (node.op, node.target, repr(map_arg((node.args, node.kwargs), lambda one: f"node {numbers[one]}"))) for node in subgraph
    )
    values = [node.meta["example_value"] for node in inputs]
    layouts = tuple(symbolic_sizes.layout_key(value) for value in values)
    return code, layouts, tuple(numbers[node] for node in results)


def _trace(subgraph: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node], owner: GraphModule) -> GraphModule:
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in subgraph:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if _is_scan(node):
            copies[node].target = fx_trace.scan_in_levels
    graph.output(tuple(copies[node] for node in results))
    alone = GraphModule(owner, graph)
    return fx_trace.retrace_to_aten(
        torch.fx.Interpreter(alone).run, [node.meta["example_value"] for node in inputs], is_transformed=True
    )
