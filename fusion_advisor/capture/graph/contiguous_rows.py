"""Contiguous rows: a value whose rows are read again and again is copied once, where it would keep a permuted layout.

A convolution's result that is permuted from ``[batch, channels, length]`` to rows keeps its memory, and so does every sum that
begins with it: pointwise ops follow their first operand's strides. In Whisper's encoder that is the whole residual stream. Each
LayerNorm and each linear copies such a value for itself, and an addition reads it across: on an H200 seven additions of 25 MB
take 86 µs each where 19 would do, and 23 copies take 1.06 ms of a step of 5.4 (bf16, 8 x 1500 x 1024, four layers).

So where two or more ops read rows of such values, the permuted value that begins them is made contiguous (``layout_copies``).
Not an image in channels last on its way to a convolution that reads it so: an attention block's result in a diffusion net.

Attention reads rows of its mask. A bias of relative positions is looked up as ``[queries, keys, heads]`` and permuted: the keys
of a row do not lie side by side, and no attention kernel for GPUs takes such a mask. PyTorch then computes the formula op by op
in fp32, in 18 launches for each self-attention of a T5 on an H100. So the mask is made contiguous, once for all layers that share
it (``docs/measurements/zoo.md``).

Where a mask depends on an input, another call's may hide every key from a query. The formula gives numbers there. So such a mask
is copied only if the kernel that takes it gives numbers too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.channels_last import CONVOLUTION, GROUP_NORM, is_quicker_channels_last
from fusion_advisor.capture.graph.fx_nodes import (
    ATTENTION,
    ATTENTION_ARGUMENTS,
    attention_argument,
    storages,
    written_storages,
)
from fusion_advisor.capture.graph.layout_copies import Relayout
from fusion_advisor.capture.graph.op_classes import base_name, class_of
from fusion_advisor.records import OpClass
from fusion_advisor.runtime.torch_internals import aten_ops, symbolic_sizes

ID = "contiguous-rows"
MASKS_ID = "contiguous-masks"
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
    value = symbolic_sizes.at_example(start.meta["val"])
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


def has_attention_kernel(call: Node) -> bool:
    """Whether one kernel serves an attention call on its fake tensors' device; on a CPU no layout of a mask changes that.

    Args:
        call: of ``scaled_dot_product_attention``.
    """
    args, kwargs = _given(call)
    return not args[0].is_cuda or aten_ops.has_attention_kernel(*args, **kwargs)


def gives_numbers(call: Node) -> bool:
    """Whether an attention call gives numbers for a query from which its mask hides every key.

    Args:
        call: of ``scaled_dot_product_attention``.
    """
    args, kwargs = _given(call)
    return aten_ops.is_finite_where_all_is_hidden(*args, **kwargs)


def _given(call: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an attention call's arguments, tensors as fakes; the mask is the fourth."""
    names = {name: attention_argument(call, name) for name in ATTENTION_ARGUMENTS}
    first = (*list(names.values())[:4], names["dropout_p"] or 0.0, bool(names["is_causal"]))
    others = {name: value for name, value in call.kwargs.items() if name not in ATTENTION_ARGUMENTS}
    given: tuple[Any, Any] = torch.fx.node.map_arg((first, others), lambda source: source.meta["val"])
    return given


def lay_masks_out(
    graph_module: GraphModule,
    parameters: Collection[str] = (),
    has_kernel: Callable[[Node], bool] = has_attention_kernel,
    is_safe: Callable[[Node], bool] = gives_numbers,
) -> int:
    """Make the masks contiguous that keep attention from being one kernel; returns how many copies that takes.

    A mask that pointwise ops make of a permuted bias is left to them, and the bias is copied: their results then have rows too.

    Args:
        graph_module: traced on fake tensors; rewritten in place.
        parameters: names of the placeholders that are parameters of the model; any other may be different in the next call.
        has_kernel: given an attention call, says whether one kernel serves it.
        is_safe: given an attention call with the copy, says whether it gives numbers where all keys are hidden.
    """

    def is_of_use(call: Node) -> bool:
        if not has_kernel(call):
            return False
        return not _follows_from_input(attention_argument(call, "attn_mask"), parameters) or is_safe(call)

    written = {key for node in graph_module.graph.nodes for key in written_storages(node)}
    waiting = [node for node in graph_module.graph.nodes if _has_strided_mask(node) and not has_kernel(node)]
    copies = 0
    for origins in (True, False):
        starts: dict[Node, list[Node]] = {}
        for call in waiting:
            mask = attention_argument(call, "attn_mask")
            for start in _origins(mask) if origins else [mask]:
                starts.setdefault(start, []).append(call)
        for start, calls in starts.items():
            if written.isdisjoint(storages(start)) and all(_has_strided_mask(call) for call in calls):
                copies += _lay_mask_out(graph_module, start, calls, is_of_use, with_all=origins)
        waiting = [call for call in waiting if _has_strided_mask(call)]
    return copies


def _lay_mask_out(
    graph_module: GraphModule, start: Node, calls: list[Node], is_of_use: Callable[[Node], bool], *, with_all: bool
) -> int:
    """Copy a mask for its attention calls, or with all its readers what it is made of.

    Returns:
        How many copies stay; 0 where no call gains a kernel.
    """
    change = Relayout(graph_module, MASKS_ID)
    is_laid_out = change.copy(start, torch.contiguous_format, None if with_all else calls)
    if is_laid_out and len(change.copies) == 1 and all(map(is_of_use, calls)) and change.keep():
        return len(change.copies)
    change.undo()
    return 0


def _has_strided_mask(node: Node) -> bool:
    """Whether a node is an attention call whose mask's layout alone may keep kernels away.

    Dropout would draw other numbers in a kernel. A mask of another dtype than the query's, which is no bool, fits none.
    """
    if node.target is not ATTENTION or attention_argument(node, "dropout_p") or attention_argument(node, "is_causal"):
        return False
    mask, query = attention_argument(node, "attn_mask"), attention_argument(node, "query")
    if not all(isinstance(one, Node) and isinstance(one.meta.get("val"), torch.Tensor) for one in (mask, *node.all_input_nodes)):
        return False
    value = mask.meta["val"]
    return value.dtype in (torch.bool, query.meta["val"].dtype) and value.shape[-1] > 1 and value.stride(-1) != 1


def _follows_from_input(mask: Node, parameters: Collection[str]) -> bool:
    """Whether a mask depends on anything but parameters and numbers of the model's own code."""
    waiting, seen = [mask], {mask}
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder" and node.name not in parameters:
            return True
        waiting += [source for source in node.all_input_nodes if source not in seen]
        seen.update(node.all_input_nodes)
    return False


def _origins(mask: Node) -> list[Node]:
    """Return the permuted values from which pointwise ops have a mask's layout; the mask itself where none made it."""
    found: dict[Node, None] = {}
    waiting, seen = [mask], {mask}
    while waiting:
        node = waiting.pop()
        sources = [source for source in node.all_input_nodes if _is_across(source, 1)] if _is_pointwise(node) else []
        if not sources:
            found[node] = None
        waiting += [source for source in sources if source not in seen]
        seen.update(sources)
    return list(found)


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


def _is_across(node: Node, fewest: int = _FEWEST_ELEMENTS) -> bool:
    """Whether a value holds all of a dense memory, in an order in which its rows are strided."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return False
    value = symbolic_sizes.at_example(value)
    if value.numel() < fewest or value.shape[-1] < 2:
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
