"""Replaces what dynamo traced under ``torch.vmap`` or another transform by the plain ops that it computes.

``torch.vmap``, ``torch.func.grad``, ``jvp`` and ``associative_scan`` (Mamba's scan) leave switches in dynamo's graph: one more
level of the transform, tensors put into it and taken out, and the ops in between as the transformed function calls them. Traced
above autograd, what is computed there is lost. So each such stretch is traced by itself below autograd, where the transform has
made batched ops, or a backward pass, of every op; the ops of that trace take the place of the stretch. Equal stretches are
traced once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fusion_advisor.capture.graph.op_recipe import layout_of
from fusion_advisor.runtime.torch_internals import fx_trace

_IN, _OUT = "_increment_nesting", "_decrement_nesting"
_LOADS = "lazy_load_decompositions"
_ORIGIN = ("nn_module_stack", "stack_trace", "source_fn_stack")


def without_transforms(graph_module: GraphModule) -> GraphModule:
    """Return a dynamo graph with plain ops in place of each stretch under a transform; the graph itself where there is none.

    Args:
        graph_module: dynamo's, with the fake tensors that it was traced on (``example_value``).
    """
    if not any(_name(node).endswith(_IN) for node in graph_module.graph.nodes):
        return graph_module
    graph = Graph()
    changed = GraphModule(graph_module, graph)
    copies: dict[Node, Node] = {}
    traced: dict[Any, GraphModule] = {}
    stretch: list[Node] = []
    depth = 0
    for node in graph_module.graph.nodes:
        if _name(node) == _LOADS:
            continue
        depth += (_name(node).endswith(_IN)) - (_name(node).endswith(_OUT))
        if depth or stretch:
            stretch.append(node)
        if depth or _name(node).endswith(_OUT):
            if not depth:
                _put_plain(stretch, changed, copies, traced)
                stretch = []
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
    changed.recompile()
    return changed


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


def _put_plain(stretch: Sequence[Node], changed: GraphModule, copies: dict[Node, Node], traced: dict[Any, GraphModule]) -> None:
    """Append the plain ops of a stretch to a graph, and note which node has the value of each node that is read outside."""
    inside = set(stretch)
    inputs = list(dict.fromkeys(source for node in stretch for source in node.all_input_nodes if source not in inside))
    results = [node for node in stretch if any(user not in inside for user in node.users)]
    key = _key(stretch, inputs, results)
    if key not in traced:
        traced[key] = _traced(stretch, inputs, results, changed)
    plain = traced[key]
    values: dict[Node, Node] = {}
    given = iter(inputs)
    for node in plain.graph.nodes:
        if node.op == "placeholder":
            values[node] = copies[next(given)]
        elif node.op == "output":
            for result, value in zip(results, node.args[0], strict=True):
                copies[result] = values[value]
        else:
            values[node] = _copy(node, plain, changed, values)
            values[node].meta.update({name: stretch[0].meta[name] for name in _ORIGIN if name in stretch[0].meta})


def _copy(node: Node, plain: GraphModule, changed: GraphModule, values: dict[Node, Node]) -> Node:
    copied = changed.graph.node_copy(node, values.__getitem__)
    copied.meta = {"example_value": node.meta["val"]} if "val" in node.meta else {}
    if node.op == "get_attr":
        held = getattr(plain, str(node.target))
        names = (f"_held_{number}" for number in range(len(changed._buffers) + 1))
        copied.target = next(name for name in names if not hasattr(changed, name))
        changed.register_buffer(copied.target, held)
    return copied


def _key(stretch: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node]) -> Any:
    """Return what is equal for stretches of the same ops on inputs of the same layouts."""
    numbers = {node: number for number, node in enumerate((*inputs, *stretch))}
    code = tuple(
        (node.op, node.target, repr(map_arg((node.args, node.kwargs), lambda one: f"node {numbers[one]}"))) for node in stretch
    )
    layouts = tuple(layout_of(node.meta["example_value"]) for node in inputs)
    return code, layouts, tuple(numbers[node] for node in results)


def _traced(stretch: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node], owner: GraphModule) -> GraphModule:
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in stretch:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    alone = GraphModule(owner, graph)
    return fx_trace.retrace_to_aten(
        torch.fx.Interpreter(alone).run, [node.meta["example_value"] for node in inputs], is_transformed=True
    )
