"""Patches by one GEMM: a convolution whose windows lie side by side is a linear layer over them.

A ViT cuts its pictures into patches with a convolution whose stride is its window. cuDNN runs it as any convolution, and reorders
the pictures and the result for that: 0.56 ms of a ViT-B/16 step of 5.3 ms (bf16, batch 64, H200), for products that a GEMM of the
same step makes in 0.02 ms. One copy puts the elements of each window side by side, a linear layer multiplies them with the weight
as it is, and a second copy gives the result the strides that the convolution gives it, where those differ. Both are kernels of
the library where those are faster than ATen's (see ``fuse.rewrite.layout_copy``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion_advisor.capture.graph.split_bias import CONVOLUTIONS, WRITTEN_OUT, written_out_bias
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.chains.trace_bytes import read_bytes
from fusion_advisor.fuse.rewrite.layout_copy import put_copy
from fusion_advisor.fuse.rewrite.price import PassEffect
from fusion_advisor.fuse.rewrite.record import PassRewrite
from fusion_advisor.records import Ref


def patches_as_gemm(graph: Graph, _region: Region, _constants: dict[str, torch.Tensor]) -> int:
    """Let convolutions over windows that neither overlap nor leave anything out run as linears; returns how many."""
    found = [node for node in graph.nodes if node.target in CONVOLUTIONS and _is_of_patches(node)]
    for node in found:
        _replace(graph, node)
    return len(found)


def _is_of_patches(node: Node) -> bool:
    x, weight, _, stride, padding, dilation, groups = arguments_of(node)
    if not all("val" in source.meta for source in node.all_input_nodes):
        return False  # a constant of the model's own code has no fake value
    picture, window = x.meta["val"].shape, weight.meta["val"].shape[2:]
    if len(picture) != len(window) + 2 or math.prod(window) == 1 or groups != 1:
        return False
    is_side_by_side = all(
        at_axis(stride, axis) == size
        and at_axis(padding, axis) == 0
        and at_axis(dilation, axis) == 1
        and picture[2 + axis] % size == 0
        for axis, size in enumerate(window)
    )
    value = node.meta["val"]
    has_known_strides = value.is_contiguous() or value.movedim(1, -1).is_contiguous()
    return is_side_by_side and weight.meta["val"].is_contiguous() and has_known_strides


def _replace(graph: Graph, node: Node) -> None:
    x, weight, bias, *_ = arguments_of(node)
    out, added = node, written_out_bias(node)
    if added is not None:
        out, bias = added
    origin: dict[str, Any] = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}

    def add(target: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Node:
        made = graph.call_function(target, args, kwargs)
        made.meta = {**origin, "val": target(*torch.fx.node.map_arg(args, lambda arg: arg.meta["val"]), **kwargs)}
        return made

    aten = torch.ops.aten
    batch, channels, *picture = x.meta["val"].shape
    rows, _, *window = weight.meta["val"].shape
    axes = range(len(window))
    windows = [size // part for size, part in zip(picture, window, strict=True)]
    cut = [batch, channels, *(size for pair in zip(windows, window, strict=True) for size in pair)]
    by_window = [0, *(2 + 2 * axis for axis in axes), 1, *(3 + 2 * axis for axis in axes)]
    with graph.inserting_before(out):
        gathered = add(aten.permute.default, add(aten.view.default, x, cut), by_window)
        if not gathered.meta["val"].is_contiguous():
            gathered = put_copy(graph, gathered, PATCH_GEMM.id)
            gathered.meta |= origin
        elements = channels * math.prod(window)
        patches = add(aten.view.default, gathered, [batch * math.prod(windows), elements])
        flat = add(aten.view.default, weight, [rows, elements])
        product = add(aten.linear.default, patches, flat, *([bias] if bias is not None else []))
        shaped = add(aten.view.default, product, [batch, *windows, rows])
        result = add(aten.permute.default, shaped, [0, len(window) + 1, *(1 + axis for axis in axes)])
        if result.meta["val"].stride() != out.meta["val"].stride():
            result = put_copy(graph, result, PATCH_GEMM.id)
            result.meta = {key: value for key, value in out.meta.items() if key != WRITTEN_OUT}
    out.replace_all_uses_with(result)
    graph.erase_node(out)
    if out is not node:
        graph.erase_node(node)


def arguments_of(node: Node) -> list[Any]:
    """Return a convolution's seven arguments; defaults stand where the call leaves one out."""
    defaults = [None, None, None, 1, 0, 1, 1]
    return [*node.args, *defaults[len(node.args) :]]


def at_axis(value: Any, axis: int) -> int:
    """Return a convolution's option for one axis: one number may stand for all."""
    return int(value if isinstance(value, int) else value[axis if len(value) > 1 else 0])


def _patched_ns(effect: PassEffect) -> int:
    """A product as those that stay, and copies of picture and result, for each convolution; all three are launched."""
    capture, after_ns = effect.capture, 3.0 * effect.sites * effect.launch_cost_ns
    for op in capture.ops:
        if op.target not in _CAPTURED or op.index not in effect.newly_removed:
            continue
        picture, weight = (capture.ops[source.index].outputs[0] for source in op.args[:2] if isinstance(source, Ref))
        runs, copied_bytes = capture.runs_of(op), read_bytes(picture) + read_bytes(op.outputs[0])
        products = runs * math.prod(op.outputs[0].shape) * math.prod(weight.shape[1:])
        after_ns += effect.gemms_ns(products, runs * (copied_bytes + read_bytes(weight)), runs)
        after_ns += effect.copies_ns(2 * runs * copied_bytes, 2 * runs)
    return max(0, effect.saved_ns - round(after_ns))


_CAPTURED = tuple(f"aten.conv{dims}d.default" for dims in (1, 2, 3))
PATCH_GEMM = PassRewrite(id="patch-gemm", title="patch convolutions → GEMM", apply=patches_as_gemm, predict=_patched_ns)
