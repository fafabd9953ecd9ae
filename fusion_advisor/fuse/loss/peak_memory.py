"""How much memory a training step takes at its peak, by the lifetimes of the tensors in its two graphs.

Weights and inputs are not counted: they are there before and after. What the forward pass keeps counts until the backward pass
has read it for the last time, as autograd frees it. Caches and alignment of the allocator are not seen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.fx_nodes import storages, tensors_of

_GIVEN = "primals"
"""How AOTAutograd names weights and inputs, in both graphs."""


def step_peak_bytes(
    forward: GraphModule, backward: GraphModule, inside: Callable[[Node], int] = lambda _: 0
) -> int:  # fmt: skip
    """Return the most bytes that are alive at once in either pass.

    Args:
        forward: AOTAutograd's graph, with the fake results of its nodes.
        backward: likewise.
        inside: says what an op holds while it runs and does not return.
    """
    return max(_peak_bytes(forward, inside), _peak_bytes(backward, inside))


def _peak_bytes(module: GraphModule, inside: Callable[[Node], int]) -> int:
    nodes = list(module.graph.nodes)
    last: dict[int, int] = {}
    for at, node in enumerate(nodes):
        for source in (node, *node.all_input_nodes):
            last.update(dict.fromkeys(storages(source), at))
    ignored = {key for node in nodes if node.op == "placeholder" and _GIVEN in str(node.target) for key in storages(node)}
    alive: dict[int, int] = {}
    peak = 0
    for at, node in enumerate(nodes):
        if node.op == "output":
            continue
        for key, value in zip(storages(node), tensors_of(node.meta.get("val")), strict=True):
            if key not in ignored:
                alive.setdefault(key, value.untyped_storage().nbytes())
        peak = max(peak, sum(alive.values()) + inside(node))
        alive = {key: size for key, size in alive.items() if last[key] > at}
    return peak


def is_op(node: Node, name: str) -> bool:
    """Whether a node calls an op of torch's.

    Args:
        node: of a graph of ops.
        name: with its namespace, without its overload.
    """
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name() == name
