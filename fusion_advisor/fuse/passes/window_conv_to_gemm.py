"""Long windows over a series by one GEMM for each group of channels.

wav2vec2, HuBERT and WavLM find positions with a convolution of 128 taps in 16 groups of 48 channels. In 16 bits cuDNN 9.19 has no
tensor core kernel for it: 12.1 ms of a wav2vec2-base step of 14 ms (8 x 149 frames, bf16, H100), whatever the layout, and with
``cudnn.benchmark`` too. Windows copied side by side and multiplied with the weight as it is, group by group, take 0.36 ms. The
copy is as many times larger than the series as a window has taps. So short windows stay with cuDNN, whose kernels gather for
themselves.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.chains.trace_bytes import read_bytes
from fusion_advisor.fuse.passes.patch_conv_to_gemm import arguments_of, at_axis
from fusion_advisor.fuse.rewrite.layout_copy import put_copy
from fusion_advisor.fuse.rewrite.price import PassEffect
from fusion_advisor.fuse.rewrite.record import PassRewrite
from fusion_advisor.records import Ref
from fusion_advisor.runtime.torch_internals import symbolic_sizes

_FEWEST_TAPS = 16
_FEWEST_CHANNELS = 8
"""Of a group, in and out: below, a tensor core has nothing to do."""
_MOST_BYTES = 1 << 29
"""Of the windows of one convolution, copied."""


def windows_as_gemm(graph: Graph, _region: Region, _constants: dict[str, torch.Tensor]) -> int:
    """Let grouped convolutions over long windows of a series run as batched products; returns how many."""
    found = [node for node in graph.nodes if node.target is torch.ops.aten.conv1d.default and _is_served(node)]
    for node in found:
        _replace(graph, node)
    return len(found)


def _is_served(node: Node) -> bool:
    x, weight, *_, dilation, groups = arguments_of(node)
    if groups == 1 or node.kwargs or not all("val" in source.meta for source in node.all_input_nodes):
        return False
    series, kernel, out = (one.meta["val"] for one in (x, weight, node))
    if any(symbolic_sizes.is_symbolic(value) for value in (series, kernel, out)) or series.dim() != 3 or not out.numel():
        return False
    rows, channels, taps = kernel.shape
    windows_bytes = out.shape[0] * out.shape[2] * series.shape[1] * taps * series.element_size()
    is_plain = kernel.is_contiguous() and out.is_contiguous() and at_axis(dilation, 0) == 1
    is_wide = min(channels, rows // groups) >= _FEWEST_CHANNELS and taps >= _FEWEST_TAPS
    return is_plain and is_wide and windows_bytes <= _MOST_BYTES


def _replace(graph: Graph, node: Node) -> None:
    x, weight, bias, stride, padding, _, groups = arguments_of(node)
    origin: dict[str, Any] = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}

    def add(target: torch._ops.OpOverload, *args: Any) -> Node:
        made = graph.call_function(target, args)
        made.meta = {**origin, "val": target(*torch.fx.node.map_arg(args, lambda arg: arg.meta["val"]))}
        return made

    aten = torch.ops.aten
    rows, channels, taps = weight.meta["val"].shape
    batch, _, steps = node.meta["val"].shape
    beside = at_axis(padding, 0)
    with graph.inserting_before(node):
        padded = add(aten.constant_pad_nd.default, x, [beside, beside]) if beside else x
        windows = add(aten.unfold.default, padded, 2, taps, at_axis(stride, 0))
        by_group = add(aten.view.default, windows, [batch, groups, channels, steps, taps])
        gathered = put_copy(graph, add(aten.permute.default, by_group, [1, 0, 3, 2, 4]), WINDOW_GEMM.id)
        gathered.meta |= origin
        flat = add(aten.view.default, gathered, [groups, batch * steps, channels * taps])
        kernel = add(aten.view.default, weight, [groups, rows // groups, channels * taps])
        product = add(aten.bmm.default, flat, add(aten.transpose.int, kernel, 1, 2))
        shaped = add(aten.view.default, product, [groups, batch, steps, rows // groups])
        result = put_copy(graph, add(aten.permute.default, shaped, [1, 0, 3, 2]), WINDOW_GEMM.id)
        result.meta |= origin
        result = add(aten.view.default, result, [batch, rows, steps])
        if bias is not None:
            result = add(aten.add.Tensor, result, add(aten.view.default, bias, [rows, 1]))
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _windowed_ns(effect: PassEffect) -> int:
    """Windows are written, read by a product as those that stay, and its result is copied; four launches with the padding."""
    capture, after_ns = effect.capture, 4.0 * effect.sites * effect.launch_cost_ns
    for op in capture.ops:
        if op.target != "aten.conv1d.default" or op.index not in effect.newly_removed:
            continue
        series, weight = (capture.ops[source.index].outputs[0] for source in op.args[:2] if isinstance(source, Ref))
        out, runs = op.outputs[0], capture.runs_of(op)
        windows_bytes = read_bytes(series) * weight.shape[-1] * out.shape[-1] // series.shape[-1]
        moved_bytes = windows_bytes + read_bytes(weight) + read_bytes(out)
        products = math.prod(out.shape) * math.prod(weight.shape[1:])
        after_ns += effect.gemms_ns(runs * products, runs * moved_bytes, runs)
        # The copy reads the series again and again out of the cache.
        after_ns += effect.copies_ns(runs * (windows_bytes + 2 * read_bytes(series) + 2 * read_bytes(out)), 3 * runs)
    return max(0, effect.saved_ns - round(after_ns))


WINDOW_GEMM = PassRewrite(
    id="window-gemm",
    title="long windows → GEMM",
    apply=windows_as_gemm,
    predict=_windowed_ns,
    after={"patch-gemm": "windows side by side need no copy of what they share"},
)
