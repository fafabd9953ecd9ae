"""A convolution's bias as an op of its own, where ATen adds it with a kernel of its own.

cuDNN is asked for the convolution alone; ATen then adds the bias in place, with a kernel that loads no vectors: on an H200 the 22
of a ConvNeXt-T step of 2.4 ms in bf16 take 0.23 ms. Written out in the captured graph, the addition joins the chain that reads it
(a LayerNorm behind a permute, a GELU, the position embedding of patches). Where no chain takes it, the convolution gets its bias
back, and the model's own op runs.

Both forms give the same bits: the convolution is rounded to its dtype before the bias is added, in one form as in the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.capture import torch_internals

_CONVOLUTIONS = (torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default, torch.ops.aten.conv3d.default)
_MARK = "is_convolution_bias"


def split_bias(graph_module: GraphModule, is_added_after: Callable[..., bool]) -> int:
    """Write out the additions of biases to convolutions; returns how many.

    Args:
        graph_module: traced on fake tensors; rewritten in place.
        is_added_after: given a convolution's arguments, its tensors as fakes, says whether ATen adds the bias afterwards
            (:func:`torch_internals.adds_bias_after_convolution`).
    """
    convolutions = [node for node in graph_module.graph.nodes if node.target in _CONVOLUTIONS and _has_bias(node)]
    chosen = [node for node in convolutions if is_added_after(*torch.fx.node.map_arg(node.args, lambda arg: arg.meta["val"]))]
    count = sum(_split(graph_module, node) for node in chosen)
    if count:
        graph_module.recompile()
    return count


def join_bias(graph: Graph) -> None:
    """Give biases that :func:`split_bias` wrote out, and that no rewrite has taken, back to their convolutions."""
    for total in [node for node in graph.nodes if _MARK in node.meta]:
        bare, shown = total.args
        is_whole = bare.target in _CONVOLUTIONS and list(bare.users) == [total] and shown.target is torch.ops.aten.view.default
        if not is_whole:
            continue
        with graph.inserting_before(bare):
            whole = graph.call_function(bare.target, (*bare.args[:2], shown.args[0], *bare.args[3:]))
        whole.meta = {key: value for key, value in total.meta.items() if key != _MARK}
        total.replace_all_uses_with(whole)
        for node in (total, bare, shown):
            if not node.users:
                graph.erase_node(node)


def _has_bias(node: Node) -> bool:
    # A constant of the model's own code has no fake value.
    return len(node.args) > 2 and isinstance(node.args[2], Node) and all("val" in source.meta for source in node.all_input_nodes)


def _split(graph_module: GraphModule, node: Node) -> bool:
    graph = graph_module.graph
    origin: dict[str, Any] = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
    x, weight, bias, *options = node.args
    assert isinstance(weight, Node) and callable(node.target)
    to_channels = [-1, *[1] * (weight.meta["val"].dim() - 2)]
    with graph.inserting_before(node):
        # The bias is read before the convolution runs, so that whatever computes it still stands ahead of both.
        shown = graph.call_function(torch.ops.aten.view.default, (bias, to_channels))
        bare = graph.call_function(node.target, (x, weight, None, *options))
        total = graph.call_function(torch.ops.aten.add.Tensor, (bare, shown))
    for made in (shown, bare, total):
        made.meta = {**origin, "val": torch_internals.fake_result(graph_module, made)}
    if {made.meta["val"].stride() for made in (bare, total)} != {node.meta["val"].stride()}:
        # ATen's addition in place keeps the convolution's strides; one that makes a tensor may choose others.
        for made in (total, bare, shown):
            graph.erase_node(made)
        return False
    total.meta |= {"val": node.meta["val"], _MARK: True}  # whose storage the views of it share
    node.replace_all_uses_with(total)
    graph.erase_node(node)
    return True
