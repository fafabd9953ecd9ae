"""What the forward pass keeps for the backward pass, where torch's min-cut partitioner would keep more than it has to.

The graph of both passes is changed and tagged before it is parted (``prepare`` of ``autograd_graphs.with_backward``).
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

_ATEN = torch.ops.aten
_SEEN_THROUGH = (
    _ATEN._to_copy.default, _ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default, _ATEN.slice.Tensor,
    _ATEN.alias.default, _ATEN.detach.default,
)  # fmt: skip
"""Casts and views that the partitioner computes again for nothing."""


def keep_less(joint: GraphModule) -> None:
    """Change the graph of both passes so that less is kept.

    Args:
        joint: of both passes, before it is parted.
    """
    _skip_detached(joint)
    _compute_log_softmax_again(joint)


def _skip_detached(joint: GraphModule) -> None:
    """Let ops read a value itself where they read it detached, which autograd does with results that a backward pass reads.

    Torch's partitioner takes ``detach`` for an op that no kernel can join. It would keep such a result, a tanh's say, and compute
    nothing again of which it is made. Inductor's decompositions make views of them, which it sees through.
    """
    for node in joint.graph.find_nodes(op="call_function", target=_ATEN.detach.default):
        (source,) = node.args
        assert isinstance(source, Node)
        node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")


def _compute_log_softmax_again(joint: GraphModule) -> None:
    """Have the backward pass compute a log-softmax again where what it is made of takes fewer bytes, or is returned anyway.

    A loss takes 16-bit logits in fp32, and torch would keep their log-softmax: twice the bytes of the logits. Models of
    transformers return the logits too, so that keeping these costs nothing. The gradient of the loss is one kernel: it reads each
    row of logits twice, the second time from the cache, and writes their gradient.
    """
    returned = set(joint.graph.output_node().all_input_nodes)
    for node in joint.graph.find_nodes(op="call_function", target=_ATEN._log_softmax.default):
        path = _narrowing_path(node)
        is_returned = not returned.isdisjoint(path) and node not in returned
        is_smaller = min(one.meta["val"].element_size() for one in path) < node.meta["val"].element_size()
        if (is_returned or is_smaller) and "recompute" not in node.meta:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def _narrowing_path(node: Node) -> list[Node]:
    """The op's operand, and what that is a cast or a view of."""
    path: list[Node] = []
    source = node.args[0]
    while isinstance(source, Node):
        path.append(source)
        is_passed = source.op == "call_function" and source.target in _SEEN_THROUGH
        source = source.args[0] if is_passed else None
    return path
