"""Attention in ranges of sizes by torch's flash kernel, where torch would choose cuDNN's, which takes a plan for each new shape.

Torch prefers cuDNN's attention on Hopper (2.11), and asks it for a plan when a shape first comes: 41 to 75 ms of an H200's host,
and 0.36 to 0.92 s where it compiles a kernel for that (13 of 45 sizes). With a growing KV cache every token is a new shape:
eager made 64 tokens of a prompt in 0.35 s where it had seen all lengths of the cache, and in 3.6 s where all were new
(Qwen2.5-7B with 4 layers). A call of one size pays once, and is timed as it is.

Flash kernels read no mask: ``drop-masks`` puts flags in their place first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion_advisor.capture.graph.fx_nodes import ATTENTION, ATTENTION_ARGUMENTS, FLASH_ATTENTION, attention_argument
from fusion_advisor.fuse.rewrite.record import PointRewrite
from fusion_advisor.runtime.torch_internals import aten_ops, fake_mode, symbolic_sizes
from fusion_advisor.runtime.torch_internals.symbolic_sizes import Symbols

_WIDEST, _STEP = 256, 8
"""Of a head: what torch's flash kernel takes, and the multiple that it pads others to."""


def use_flash(
    graph: Graph, symbols: Symbols, dims: Mapping[Any, Any] = MappingProxyType({}), *,
    kernel_of: Callable[..., str] = aten_ops.attention_kernel, flash: Any = FLASH_ATTENTION,
) -> int:  # fmt: skip
    """Call the flash kernel in place of each attention call that cuDNN would serve at some sizes; return how many.

    Args:
        graph: with open sizes or without.
        symbols: the size of each.
        dims: what each symbol is. Keys and values may have a symbol each for the length of a cache.
        kernel_of: names the op that serves a call, as :func:`aten_ops.attention_kernel`.
        flash: the op to call; of its results the first is attention's.
    """
    chosen: dict[Any, bool] = {}
    changed = 0
    for call in [node for node in graph.nodes if node.target is ATTENTION]:
        if not _fits(call, dims):
            continue
        key = (*map(symbolic_sizes.layout_key, _operands(call)), attention_argument(call, "is_causal"))
        if key not in chosen:
            chosen[key] = "cudnn" in kernel_of(
                *fake_mode.lying_at(_operands(call), symbols), None, 0.0, bool(attention_argument(call, "is_causal")),
                **_options(call),
            )  # fmt: skip
        if chosen[key]:
            _put(graph, call, flash)
            changed += 1
    return changed


def _fits(call: Node, dims: Mapping[Any, Any]) -> bool:
    """Whether the flash kernel computes a call, at all sizes that the call may have.

    It counts causal rows from the last key, and attention from the first: they agree where there are as many queries as keys.
    """
    if attention_argument(call, "attn_mask") is not None or attention_argument(call, "dropout_p"):
        return False
    if not isinstance(call.kwargs.get("scale"), float | None):
        return False
    values = _operands(call)
    if any(one.dim() != 4 or one.dtype != values[0].dtype for one in values) or values[0].dtype not in _DTYPES:
        return False
    (batch, heads, queries, width), (_, shared, keys, _), _ = shapes = [
        [_plain(size, dims) for size in one.shape] for one in values
    ]
    if any(one[0] != batch or one[3] != width for one in shapes) or shapes[2][1:3] != [shared, keys]:
        return False
    if not all(isinstance(size, int) for size in (heads, shared, width)) or width > _WIDEST or width % _STEP:
        return False
    if heads != shared and not (call.kwargs.get("enable_gqa") and heads % shared == 0):
        return False
    if any(_plain(one.stride(3), dims) != 1 for one in values):
        return False
    return not attention_argument(call, "is_causal") or queries == keys


_DTYPES = (torch.float16, torch.bfloat16)


def _plain(size: Any, dims: Mapping[Any, Any]) -> Any:
    """Return a size as a number, or as an expression of dims that is equal for equal sizes."""
    found = symbolic_sizes.expression_of(size)
    return found if isinstance(found, int) else found.xreplace(dims)


def _operands(call: Node) -> list[torch.Tensor]:
    return [attention_argument(call, name).meta["val"] for name in ATTENTION_ARGUMENTS[:3]]


def _options(call: Node) -> dict[str, Any]:
    return {name: value for name, value in call.kwargs.items() if name not in ATTENTION_ARGUMENTS}


def _put(graph: Graph, call: Node, flash: Any) -> None:
    """Call ``flash`` in place of an attention call; its result lies as that of the call, which both lay out like the queries."""
    operands = [attention_argument(call, name) for name in ATTENTION_ARGUMENTS[:3]]
    scale, value = call.kwargs.get("scale"), call.meta["val"]
    with graph.inserting_before(call):
        options: dict[str, Any] = {} if scale is None else {"scale": scale}
        made = graph.call_function(flash, (*operands, 0.0, bool(attention_argument(call, "is_causal"))), options)
        result = graph.call_function(operator.getitem, (made, 0))
    made.meta = {**call.meta, "val": (value, value.new_empty(value.shape[:3], dtype=torch.float32))}
    result.meta = dict(call.meta)
    call.replace_all_uses_with(result)
    graph.erase_node(call)


FLASH = PointRewrite(
    id="flash-attention",
    title="attention without plans",
    after={"drop-masks": "a flash kernel reads no mask", "group-heads": "it shares KV heads itself"},
)
