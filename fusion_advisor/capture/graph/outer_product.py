"""Products over a dimension of one element are written as multiplications, which chains can take in.

Many decoders compute the angles of rotary embeddings as ``inv_freq @ position_ids`` with an inner dimension of one: a call of
cuBLAS for a few thousand multiplications, and the rotary table falls into several kernels around it. Each element of such a
product is one multiplication, rounded once, in either form. (Under TF32 a product also rounds its operands; the multiplication
does not.)
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.runtime.torch_internals import fake_mode

_aten = torch.ops.aten
_PRODUCTS = (_aten.matmul.default, _aten.bmm.default, _aten.mm.default)


def multiply_outer_products(graph_module: GraphModule) -> int:
    """Replace products whose inner dimension is one, where the multiplication gives the same layout; returns how many.

    Args:
        graph_module: traced on fake tensors; rewritten in place.
    """
    count = sum(_replace(graph_module, node) for node in graph_module.graph.nodes if _is_outer(node))
    if count:
        graph_module.recompile()
    return count


def _is_outer(node: Node) -> bool:
    if node.target not in _PRODUCTS or node.kwargs:
        return False
    if not all(isinstance(source, Node) and "val" in source.meta for source in node.args):
        return False  # a constant of the model's own code has no fake value
    left, right = (source.meta["val"] for source in node.args if isinstance(source, Node))
    is_same_dtype = left.dtype == right.dtype == node.meta["val"].dtype  # in autocast a product casts its operands
    return is_same_dtype and min(left.dim(), right.dim()) >= 2 and left.shape[-1] == 1 and left.device == right.device


def _replace(graph_module: GraphModule, node: Node) -> bool:
    before, product = node.meta["val"], node.target
    node.target = _aten.mul.Tensor
    after = fake_mode.fake_result(graph_module, node)
    if (after.shape, after.stride()) == (before.shape, before.stride()):
        return True
    node.target = product
    return False
