"""Biases as ops of their own, where that costs nothing or saves time.

- cuDNN is asked for a convolution alone; ATen then adds the bias in place, with a kernel that loads no vectors: on an H200 the 22
  of a ConvNeXt-T step of 2.4 ms in bf16 take 0.23 ms.
- A GEMM in fp32 gets its bias from cuBLASLt's epilogue, whose kernels do not split the sum. With few tiles they leave most of the
  device idle: 128 x 3072 by 3072 x 768 takes 63 µs on an H200, and 22 µs without the bias.

Written out in the captured graph, the addition joins the chain that reads it (a LayerNorm, a GELU, the position embedding of
patches). Where no chain takes it, the op gets its bias back, and the model's own op runs; a graph pass may keep a
GEMM's bias as an op of its own.

A convolution is rounded to its dtype before the bias is added, in one form as in the other: the bits are the same. A GEMM's sums
are made in another order, as another kernel makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.runtime.torch_internals import fake_mode

CONVOLUTIONS = (torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default, torch.ops.aten.conv3d.default)
_LINEAR, _ADDMM, _MM = torch.ops.aten.linear.default, torch.ops.aten.addmm.default, torch.ops.aten.mm.default
WRITTEN_OUT = "is_written_out_bias"
LAUNCHES_OF = "launches_of"
"""Where a node has its bias back: names of the captured nodes whose launches are its own."""
_FEWEST_ROWS = 32
"""Below, a GEMM is a matrix-vector product: it reads its weight once, whatever is done with the sums."""
_MOST_ELEMENTS = 264 * 64 * 64
"""Of a GEMM's result: two tiles of 64 x 64 for each of an H200's 132 SMs. With more of them the epilogue is the faster way."""


def allows_tf32() -> bool:
    """Whether GEMMs of fp32 may round their operands to TF32, as torch is set now.

    Neither ``allow_tf32`` nor ``get_float32_matmul_precision``: reading them raises where somebody used the newer switch.
    """
    precision = torch.backends.cuda.matmul.fp32_precision
    if precision == "none":
        precision = getattr(torch.backends, "fp32_precision", "ieee")
    return precision == "tf32"


def is_slower_with_bias(out: torch.Tensor) -> bool:
    """Whether a GEMM with this result takes longer with its bias in the epilogue than without it and an addition: see above."""
    has_fp32_sums = out.is_cuda and out.dtype == torch.float32 and not allows_tf32()
    rows = out.numel() // max(out.shape[-1], 1)
    return has_fp32_sums and rows >= _FEWEST_ROWS and out.numel() <= _MOST_ELEMENTS


def split_bias(
    graph_module: GraphModule,
    is_added_after: Callable[..., bool],
    is_slower: Callable[[torch.Tensor], bool],
) -> int:
    """Write out the additions of biases to convolutions and to small GEMMs in fp32; returns how many.

    Args:
        graph_module: traced on fake tensors; rewritten in place.
        is_added_after: given a convolution's arguments, its tensors as fakes, says whether ATen adds the bias afterwards
            (:func:`aten_ops.adds_bias_after_convolution`).
        is_slower: given a GEMM's result, says whether its bias is better added afterwards (:func:`is_slower_with_bias`).
    """
    convolutions = [node for node in graph_module.graph.nodes if node.target in CONVOLUTIONS and _has_bias(node)]
    chosen = [node for node in convolutions if is_added_after(*torch.fx.node.map_arg(node.args, lambda arg: arg.meta["val"]))]
    count = sum(_split(graph_module, node) for node in chosen)
    for node in [node for node in graph_module.graph.nodes if _has_vector_bias(node) and is_slower(node.meta["val"])]:
        _split_gemm(graph_module, node)
        count += 1
    if count:
        graph_module.recompile()
    return count


def leave_gemm_biases_apart(graph: Graph) -> int:
    """Keep written-out biases of GEMMs from being given back; returns how many."""
    left = [node for node in graph.nodes if WRITTEN_OUT in node.meta and node.args[0].target in (_LINEAR, _MM)]
    for total in left:
        del total.meta[WRITTEN_OUT]
    return len(left)


def join_bias(graph: Graph) -> None:
    """Give biases that :func:`split_bias` wrote out, and that no rewrite has taken, back to their ops."""
    for total in [node for node in graph.nodes if WRITTEN_OUT in node.meta]:
        bare, shown = total.args
        if bare.target in (_LINEAR, _MM):
            _join_gemm(graph, total)
            continue
        is_whole = bare.target in CONVOLUTIONS and list(bare.users) == [total] and shown.target is torch.ops.aten.view.default
        if not is_whole:
            continue
        with graph.inserting_before(bare):
            whole = graph.call_function(bare.target, (*bare.args[:2], shown.args[0], *bare.args[3:]))
        whole.meta = {key: value for key, value in total.meta.items() if key != WRITTEN_OUT}
        whole.meta[LAUNCHES_OF] = (bare.name, total.name)  # ATen adds the bias with a kernel of its own
        total.replace_all_uses_with(whole)
        for node in (total, bare, shown):
            if not node.users:
                graph.erase_node(node)


def written_out_bias(convolution: Node) -> tuple[Node, Node] | None:
    """Return the addition of a convolution's written-out bias, and the bias; None where there is none or a chain has taken it."""
    users = list(convolution.users)
    if len(users) != 1 or WRITTEN_OUT not in users[0].meta:
        return None
    total = users[0]
    _, shown = total.args
    return (total, shown.args[0]) if isinstance(shown, Node) and isinstance(shown.args[0], Node) else None


def _has_vector_bias(node: Node) -> bool:
    if node.target not in (_LINEAR, _ADDMM) or node.kwargs or not _has_bias(node):
        return False
    bias = node.args[2 if node.target is _LINEAR else 0]
    return isinstance(bias, Node) and bias.meta["val"].shape == node.meta["val"].shape[-1:]


def _split_gemm(graph_module: GraphModule, node: Node) -> None:
    graph = graph_module.graph
    origin: dict[str, Any] = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
    (x, weight, bias), bare_op = (node.args, _LINEAR) if node.target is _LINEAR else ((*node.args[1:], node.args[0]), _MM)
    with graph.inserting_before(node):
        bare = graph.call_function(bare_op, (x, weight))
        total = graph.call_function(torch.ops.aten.add.Tensor, (bare, bias))
    bare.meta = {**origin, "val": fake_mode.fake_result(graph_module, bare)}
    total.meta = {**origin, "val": node.meta["val"], WRITTEN_OUT: True}
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def _join_gemm(graph: Graph, total: Node) -> None:
    bare, bias = total.args
    if not isinstance(bare, Node) or list(bare.users) != [total]:
        return
    x, weight = bare.args
    with graph.inserting_before(total):
        arguments = (x, weight, bias) if bare.target is _LINEAR else (bias, x, weight)
        whole = graph.call_function(_LINEAR if bare.target is _LINEAR else _ADDMM, arguments)
    whole.meta = {key: value for key, value in total.meta.items() if key != WRITTEN_OUT}
    whole.meta[LAUNCHES_OF] = (bare.name,)  # the epilogue adds the bias
    total.replace_all_uses_with(whole)
    for node in (total, bare):
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
        made.meta = {**origin, "val": fake_mode.fake_result(graph_module, made)}
    if {made.meta["val"].stride() for made in (bare, total)} != {node.meta["val"].stride()}:
        # ATen's addition in place keeps the convolution's strides; one that makes a tensor may choose others.
        for made in (total, bare, shown):
            graph.erase_node(made)
        return False
    total.meta |= {"val": node.meta["val"], WRITTEN_OUT: True}  # whose storage the views of it share
    node.replace_all_uses_with(total)
    graph.erase_node(node)
    return True
