"""Nodes that stand for sizes in a graph: an op is given a size by a node, and a number by its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.runtime.torch_internals import symbolic_sizes


def let_nodes_stand_for_sizes(graph_module: GraphModule) -> None:
    """Give each open size that is in an op's arguments, and the size of each open dim, a node that stands for it."""
    graph = graph_module.graph
    inputs = {
        symbol: node
        for node in reversed(graph.nodes)
        if node.op == "placeholder" and (symbol := symbolic_sizes.symbol_of(node.meta.get("val"))) is not None
    }
    made: dict[Any, Node] = {}
    after = next(node for node in graph.nodes if node.op != "placeholder")
    for node in [node for node in graph.nodes if node.op == "placeholder"]:
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            symbol = symbolic_sizes.symbol_of(size)
            if symbol is not None and symbol not in inputs:  # dynamo hands over what its own graph reads
                with graph.inserting_before(after):
                    inputs[symbol] = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                inputs[symbol].meta["val"] = size

    def named(value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        expression = symbolic_sizes.expression_of(value)
        if expression in inputs:
            return inputs[expression]
        if expression not in made:
            symbols = sorted(symbolic_sizes.symbols_in(expression), key=str)
            with graph.inserting_before(after):
                compute = symbolic_sizes.computing(expression, symbols)
                made[expression] = graph.call_function(compute, tuple(inputs[symbol] for symbol in symbols))
            made[expression].meta["val"] = value
        return made[expression]

    for node in list(graph.nodes):
        if node not in made.values():
            node.args, node.kwargs = mapped(node.args, named), mapped(node.kwargs, named)
    graph_module.recompile()


def put_input_numbers_in(graph_module: GraphModule, example_args: Sequence[Any]) -> dict[int, float]:
    """Write the numbers that a graph reads off its inputs into its ops; return each with the input's place.

    With ``dynamic=True`` dynamo passes a model's Python floats as tensors of one element: whoever runs the graph has to see that
    they are the same.

    Args:
        graph_module: with open sizes; changed in place.
        example_args: of the call whose numbers are written.
    """
    inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    read: dict[int, float] = {}
    numbers: dict[Node, Any] = {}

    def number(value: Any) -> Any:
        return numbers.get(value, value) if isinstance(value, Node) else value

    for node in list(graph_module.graph.nodes):
        if node.op != "call_function":
            continue
        source = node.args[0] if node.args else None
        node.args, node.kwargs = mapped(node.args, number), mapped(node.kwargs, number)
        if node.target is torch.ops.aten.item.default and isinstance(source, Node) and source in inputs:
            slot = inputs.index(source)
            numbers[node] = read[slot] = example_args[slot].item()
        elif not node.all_input_nodes and symbolic_sizes.is_size(node.meta.get("val")):
            assert callable(node.target)
            numbers[node] = node.target(*node.args, **node.kwargs)
    for node in reversed(numbers):
        graph_module.graph.erase_node(node)
    graph_module.recompile()
    return read


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a node's arguments with each leaf replaced; a slice's parts are leaves."""
    if isinstance(value, tuple | list):
        return type(value)([mapped(item, change) for item in value])
    if isinstance(value, dict):
        return {name: mapped(item, change) for name, item in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(one, change) for one in (value.start, value.stop, value.step)))
    return change(value)
