"""The graph of one size: the nodes of a graph with open sizes, in the same order, with numbers where sizes were open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.capture.graph.retrace import give_results_of_eager
from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.capture.graph.tracer import LiveCapture, Region, Run
from fusion_advisor.capture.sizes.open_capture import OpenCapture
from fusion_advisor.capture.sizes.size_nodes import mapped
from fusion_advisor.runtime.torch_internals import fake_mode, symbolic_sizes


def at_one_size(opened: OpenCapture, example_args: Sequence[Any], written: Written | None = None) -> LiveCapture:
    """Return the graph of one size: the same nodes in the same order, with numbers where sizes were open.

    Args:
        opened: the graph.
        example_args: what the region is called with at that size.
        written: what a call of that size writes to.
    """
    region = runnable_at(opened, example_args)
    fake_mode.propagate(region.graph, example_args)
    give_results_of_eager(region.graph)
    return LiveCapture(regions=[region], runs=[Run(0, region.example_args)], written=written or Written())


def runnable_at(opened: OpenCapture, example_args: Sequence[Any]) -> Region:
    """Return the graph of one size to be run alone: its values' layouts stay those of open sizes.

    It takes a fifth of :func:`at_one_size`, which runs each op on fake tensors.

    Args:
        opened: the graph.
        example_args: what the region is called with at that size.
    """
    region = opened.region
    graph = Graph()
    values: dict[Node, Any] = {}
    copies: dict[Node, Node] = {}
    numbers = _numbers_of(opened, region, example_args)

    def fixed(value: Any) -> Any:
        expression = symbolic_sizes.expression_of(value)
        return value if expression is value else symbolic_sizes.at_sizes(expression, numbers)

    for node in region.graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            values[node] = fixed(value)
        copies[node] = graph.node_copy(node, copies.__getitem__)

    def replaced(value: Any) -> Any:
        if isinstance(value, Node):
            return values[value] if value in values else copies[value]
        return fixed(value)

    for node, copy in copies.items():
        copy.args, copy.kwargs = mapped(node.args, replaced), mapped(node.kwargs, replaced)
    module = GraphModule(region.graph, graph, class_name="RegionOfOneSize")
    return replace(region, graph=module, original=module, example_args=tuple(example_args), route=None)


def _numbers_of(opened: OpenCapture, region: Region, example_args: Sequence[Any]) -> dict[Any, int]:
    found: dict[Any, int] = {}
    inputs = [node for node in region.graph.graph.nodes if node.op == "placeholder"]
    for node, given in zip(inputs, example_args, strict=True):
        value = node.meta.get("val")
        sizes = zip(value.shape, given.shape, strict=True) if isinstance(value, torch.Tensor) else [(value, given)]
        for open_size, size in sizes:
            symbol = symbolic_sizes.symbol_of(open_size)
            if symbol in opened.names:
                found[symbol] = int(size)
    return found
