"""Contiguous rows: a value whose rows are read again and again is copied once, where it would keep a permuted layout.

A convolution's result that is permuted from ``[batch, channels, length]`` to rows keeps its memory, and so does every sum that
begins with it: pointwise ops follow their first operand's strides. In Whisper's encoder that is the whole residual stream. Each
LayerNorm and each linear copies such a value for itself, and an addition reads it across: on an H200 seven additions of 25 MB
take 86 µs each where 19 would do, and 23 copies take 1.06 ms of a step of 5.4 (bf16, 8 x 1500 x 1024, four layers).

So where two or more ops read rows of such values, the permuted value that begins them is made contiguous (``layout_copies``).
Not an image in channels last on its way to a convolution that reads it so: an attention block's result in a diffusion net.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.channels_last import CONVOLUTION, GROUP_NORM, is_quicker_channels_last
from fusion_advisor.capture.graph.layout_copies import Relayout
from fusion_advisor.capture.graph.op_classes import base_name, class_of
from fusion_advisor.records import OpClass

ID = "contiguous-rows"
_FEWEST_READERS = 2
_FEWEST_ELEMENTS = 1 << 12


def lay_rows_out(
    graph_module: GraphModule, is_quicker: Callable[[torch.Tensor], bool] = is_quicker_channels_last
) -> int:  # fmt: skip
    """Make permuted values contiguous whose rows two or more ops read, by way of pointwise ops; returns how many.

    Args:
        graph_module: traced on fake tensors; rewritten in place.
        is_quicker: given an image, says whether convolutions of it are quicker in channels last.
    """
    starts: dict[Node, None] = {}
    for node in graph_module.graph.nodes:
        if _is_pointwise(node) and _is_across(node):
            found = [source for source in node.all_input_nodes if _is_across(source) and _has_shape_of(source, node)]
            if found and not any(_is_pointwise(source) for source in found) and _readers(node) >= _FEWEST_READERS:
                starts.update(dict.fromkeys(found))
    changed = 0
    for start in starts:
        if is_quicker(start.meta["val"]) and _is_image(start):
            continue
        # An output that has to be copied back is no gain: one copy more for each copy less.
        change = Relayout(graph_module, ID)
        is_kept = change.copy(start, torch.contiguous_format) and len(change.copies) == 1 and change.keep()
        if is_kept and len(change.copies) == 1:
            changed += 1
        else:
            change.undo()
    return changed


def _is_image(start: Node) -> bool:
    """Whether a value lies in channels last, and a convolution reads it by way of norms and pointwise ops."""
    value = start.meta["val"]
    if value.dim() != 4 or not value.is_contiguous(memory_format=torch.channels_last):
        return False
    seen, waiting = {start}, [start]
    while waiting:
        for user in waiting.pop().users:
            if user.target is CONVOLUTION:
                return True
            if user not in seen and (_is_pointwise(user) or user.target is GROUP_NORM):
                seen.add(user)
                waiting.append(user)
    return False


def _readers(start: Node) -> int:
    """Count the ops that read rows of a value, or of what pointwise ops make of it in the same layout."""
    seen, waiting, readers = {start}, [start], 0
    while waiting:
        for user in waiting.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if _class_of(user) in (OpClass.REDUCTION, OpClass.GEMM):
                readers += 1
            elif _is_pointwise(user) and _is_across(user):
                waiting.append(user)
    return readers


def _is_across(node: Node) -> bool:
    """Whether a value holds all of a dense memory, in an order in which its rows are strided."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.numel() < _FEWEST_ELEMENTS or value.shape[-1] < 2:
        return False
    return value.stride(-1) != 1 and bool(torch.ops.aten.is_non_overlapping_and_dense.default(value))


def _has_shape_of(source: Node, node: Node) -> bool:
    return bool(source.meta["val"].shape == node.meta["val"].shape)


def _is_pointwise(node: Node) -> bool:
    return _class_of(node) is OpClass.POINTWISE or node.target is torch.ops.aten.dropout.default


def _class_of(node: Node) -> OpClass | None:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    return class_of(base_name(str(node.target)))
