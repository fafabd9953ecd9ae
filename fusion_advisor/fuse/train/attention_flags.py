"""Attention of a training step as eager calls it: a causal flag in place of a mask, shared KV heads in place of copies.

While it is traced, transformers makes a causal mask and one copy of each KV head for every query head that shares it. Eager does
neither. Kernels with a mask compute the half that it hides: on an H200 the attention of a step of GPT-2 (32 x 1,024 tokens, bf16)
takes 26 ms with masks and 10.6 ms in eager, of Qwen2.5-0.5B (4 x 2,048) 20.7 and 7.6 ms.

The calls are changed in dynamo's graph, where attention is one op: AOTAutograd then chooses the kernels of both passes by its
arguments. What a mask says is read in the graph of ATen ops that stands for the same calls, by the rules of ``drop-masks``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

from fusion_advisor.capture.graph.fx_nodes import ATTENTION, ATTENTION_ARGUMENTS, attention_argument
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.passes.attention import constant_masks, is_repeat_of_heads, meaning_of, put_flag, unrepeated

_ATTENTION = functional.scaled_dot_product_attention
_INSERTED = (slice(None), slice(None), None, slice(None), slice(None))
"""Index that gives a tensor of KV heads a dim after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSite:
    """An attention call whose mask says no more than a flag.

    Attributes:
        call: in dynamo's graph.
        traced: the same call in ATen ops.
        meaning: ``causal`` or ``all true``.
        mask: its value.
        shared: key and value in dynamo's graph before they were repeated for the query heads; None where they were not, or where
            no kernel of the device reads shared heads in the dtype.
        traced_shared: the same in ATen ops.
    """

    call: Node
    traced: Node
    meaning: str
    mask: torch.Tensor
    shared: tuple[Node, Node] | None
    traced_shared: tuple[Node, Node] | None


def find_flag_sites(graph_module: GraphModule, traced: GraphModule) -> list[FlagSite]:
    """Return the attention calls that need no mask: its value depends on no input, and is causal or hides nothing.

    Args:
        graph_module: dynamo's.
        traced: the same graph in ATen ops.
    """
    calls = [node for node in graph_module.graph.nodes if node.target is _ATTENTION]
    ops = [node for node in traced.graph.nodes if node.target is ATTENTION]
    if not calls or len(calls) != len(ops):  # another op of dynamo's graph holds attention too: nothing says which is which
        return []
    masks = constant_masks(traced.graph, Region(index=0, graph=traced, original=graph_module))
    sites = []
    for call, op in zip(calls, ops, strict=True):
        query, mask = attention_argument(op, "query").meta["val"], masks.get(op)
        is_same = isinstance(attention_argument(call, "attn_mask"), Node) and query.dim() == 4
        meaning = meaning_of(mask) if mask is not None and is_same else None
        if mask is None or meaning is None:
            continue
        shared, traced_shared = (_shared_heads(one, of) for one, of in ((call, _repeated), (op, unrepeated)))
        may_share = shared is not None and traced_shared is not None and takes_shared_heads(query)
        sites.append(
            FlagSite(
                call=call, traced=op, meaning=meaning, mask=mask, shared=shared if may_share else None,
                traced_shared=traced_shared if may_share else None,
            )
        )  # fmt: skip
    return sites


def with_flags(graph_module: GraphModule, sites: Sequence[FlagSite], *, shares_heads: bool) -> GraphModule:
    """Return a copy of dynamo's graph with flags in place of masks; what made the masks is dead in it.

    Args:
        graph_module: stays as it is.
        sites: of it.
        shares_heads: whether attention reads shared KV heads itself.
    """
    graph, copies = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(graph_module.graph, copies))
    for site in sites:
        call = copies[site.call]
        put_flag(call, site.meaning)
        if shares_heads and site.shared is not None:
            key, value = (copies[one] for one in site.shared)
            call.args = (call.args[0], key, value, *call.args[3:])
            call.kwargs = {**call.kwargs, "enable_gqa": True}
    module = GraphModule(graph_module, graph)
    module.meta.update(graph_module.meta)
    return module


def _shared_heads(call: Node, unrepeated_of: Any) -> tuple[Node, Node] | None:
    if call.kwargs.get("enable_gqa"):
        return None
    key, value = (unrepeated_of(attention_argument(call, name)) for name in ATTENTION_ARGUMENTS[1:3])
    return None if key is None or value is None else (key, value)


def _repeated(node: object) -> Node | None:
    """Return k for ``k[:, :, None, :, :].expand(B, H, n, S, D).reshape(B, H·n, S, D)`` of dynamo's; else None."""
    expanded = _source(node, "reshape", "view")
    inserted = _source(expanded, "expand")
    if not isinstance(node, Node) or expanded is None or inserted is None:
        return None
    source = inserted.args[0]
    if inserted.target is not operator.getitem or inserted.args[1] != _INSERTED or not isinstance(source, Node):
        return None
    shapes = [one.meta["example_value"].shape for one in (source, expanded, node)]
    return source if is_repeat_of_heads(*shapes) else None


def _source(node: object, *methods: str) -> Node | None:
    """Return what a method of a tensor is called on; None for another op."""
    if not isinstance(node, Node) or node.op != "call_method" or node.target not in methods:
        return None
    return node.args[0] if isinstance(node.args[0], Node) else None


def takes_shared_heads(query: torch.Tensor) -> bool:
    """Whether attention kernels read shared KV heads: on a GPU those for 16 bits do, and torch computes others op by op.

    Args:
        query: of a call.
    """
    return query.device.type == "cpu" or query.dtype.itemsize == 2
