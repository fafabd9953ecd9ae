"""Computes a weight's gradient after the input's where it reads an activation that the backward pass computes again.

Autograd computes the weight's gradient first. It reads the activation, or the product of a gate, so that this would be computed
before the gradient of the layer's input is there. The activation's own backward op waits for that gradient, and reads the same
large tensors. In autograd's order these are two kernels. With the weight's gradient last, one kernel makes both.
"""

from __future__ import annotations

import itertools

from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.op_classes import base_name, class_of
from fusion_advisor.fuse.train.passes.as_autograd import is_gradient
from fusion_advisor.records import OpClass


def sink_weight_gradients(graph_module: GraphModule) -> GraphModule:
    """Let each such product change places with the next one, if both read one gradient; returns the graph.

    Args:
        graph_module: one of AOTAutograd's passes; it is changed.
    """
    nodes = list(graph_module.graph.nodes)
    led = _led_by_gradients(nodes)
    products = [number for number, node in enumerate(nodes) if _class(node) is OpClass.GEMM]
    for here, there in itertools.pairwise(products):
        between = nodes[here : there + 1]
        moved = _to_move(between, led)
        if moved and not any(_writes(node) for node in between):
            for node in reversed(moved):
                nodes[there].append(node)
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module


def _to_move(between: list[Node], led: set[Node]) -> list[Node]:
    """From a product to the next: the first with its views, in order; none where it should stay."""
    product, following = between[0], between[-1]
    gradients = {one for one in map(_behind_views, product.all_input_nodes) if one in led}
    again = [one for one in product.all_input_nodes if _is_computed_again(_behind_views(one), led)]
    if not gradients or not again or gradients.isdisjoint(map(_behind_views, following.all_input_nodes)):
        return []
    before = [view for one in again for view in _own_views(one, product)]
    after = [product]
    for node in between[1:]:
        if not set(after).isdisjoint(node.all_input_nodes):
            if _class(node) is not OpClass.VIEW:
                return []
            after.append(node)
    return [*before, *after]


def _own_views(value: Node, reader: Node) -> list[Node]:
    """The views between a value and its one reader, first ones first."""
    found: list[Node] = []
    while _class(value) is OpClass.VIEW and list(value.users) == [reader]:
        found.insert(0, value)
        reader, value = value, value.all_input_nodes[0]
    return found


def _is_computed_again(node: Node, led: set[Node]) -> bool:
    """Whether a value is computed again of values that a gradient's pointwise op reads too; a weight's cast is not."""
    seen, waiting = set[Node](), [node]
    while waiting:
        one = waiting.pop()
        if one not in seen and one not in led:
            seen.add(one)
            if _class(one) in (OpClass.POINTWISE, OpClass.VIEW):
                waiting += one.all_input_nodes
    is_own = node not in led and _class(node) is OpClass.POINTWISE
    return is_own and any(user in led and _class(user) is OpClass.POINTWISE for one in seen for user in one.users)


def _behind_views(node: Node) -> Node:
    while _class(node) is OpClass.VIEW:
        node = node.all_input_nodes[0]
    return node


def _led_by_gradients(nodes: list[Node]) -> set[Node]:
    """What depends on a gradient of an output."""
    found: set[Node] = set()
    for node in nodes:
        if (node.op == "placeholder" and is_gradient(node)) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _class(node: Node) -> OpClass:
    return class_of(base_name(str(node.target))) if node.op == "call_function" else OpClass.OTHER
