"""Attention as eager runs it: masks that say no more than a flag become the flag, repeated KV heads become ``enable_gqa``.

One KV head that broadcasts over all query heads (Falcon) fits no attention kernel: torch asks for equal counts, or for the flag,
and computes the formula op by op otherwise.

A traced model hands ``scaled_dot_product_attention`` a mask that eager does not build. On an H200 that costs attention
2.4 → 6.4 ms on Qwen2.5-7B at 2048 tokens, and at odd lengths the fused kernels refuse the mask altogether. Nothing is
assumed here: the mask is evaluated, which is only possible because it depends on no input, and compared element by element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion_advisor.capture.graph.fx_nodes import (
    ATTENTION,
    ATTENTION_ARGUMENTS,
    attention_argument,
    storages,
    written_storages,
)
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.chains.trace_bytes import read_bytes
from fusion_advisor.fuse.passes.constant_folding import evaluate, foldable_nodes, literals_of
from fusion_advisor.fuse.rewrite.price import PassEffect
from fusion_advisor.fuse.rewrite.record import PassRewrite
from fusion_advisor.records import Arg, Capture, OpClass, OpNode, Ref, TensorMeta
from fusion_advisor.runtime.torch_internals import aten_ops, fake_mode, symbolic_sizes
from fusion_advisor.runtime.torch_internals.symbolic_sizes import Symbols
from fusion_advisor.verify.subgraph_oracle import extent, has_strides

_CAPTURED_ATTENTION = "aten.scaled_dot_product_attention.default"
"""An attention call in a capture."""


def drop_masks(graph: Graph, region: Region, _constants: dict[str, torch.Tensor]) -> int:
    """Replace masks that evaluate to "causal" or "all true" by ``is_causal`` or no mask; returns how many.

    Must run before the masks are folded into stored tensors.
    """
    meanings = mask_meanings(graph, region)
    for node, found in meanings.items():
        put_flag(node, found)
    return len(meanings)


def mask_meanings(graph: Graph, region: Region) -> dict[Node, str]:
    """Return the attention calls whose mask depends on no input and says no more than a flag: ``causal`` or ``all true``.

    Args:
        graph: the region's, or a copy of it.
        region: holds the literals of the model's own code.
    """
    masks = constant_masks(graph, region)
    meaning = {id(mask): meaning_of(mask) for mask in masks.values()}
    found = {node: meaning[id(mask)] for node, mask in masks.items()}
    return {node: text for node, text in found.items() if text is not None}


def constant_masks(graph: Graph, region: Region) -> dict[Node, torch.Tensor]:
    """Return the masks that depend on no input, by the attention calls that read them; calls with one mask share its tensor.

    Args:
        graph: the region's, or a copy of it.
        region: holds the literals of the model's own code.
    """
    calls = masked_calls(graph)
    literals = literals_of(graph, region)
    foldable = foldable_nodes(graph, literals)
    values = evaluate([mask for mask in dict.fromkeys(calls.values()) if mask in foldable], literals)
    return {node: values[mask] for node, mask in calls.items() if mask in values}


def share_masks(graph: Graph, _region: Region, _constants: dict[str, torch.Tensor]) -> int:
    """Turn a boolean mask that several calls read into the additive one that each of them makes of it.

    ``scaled_dot_product_attention`` fills two scalars and runs a ``where`` over the mask in every call: in a decode step of 28
    layers 84 launches and 122 µs (H200). What it makes is read off one call on tensors of these layouts; of open sizes, on those
    of the captured call, and :func:`masks_read` tells whether other sizes lead to the same kernel.

    Returns:
        How many calls convert their mask no longer.
    """
    changed = 0
    for mask, same in _sharing(graph):
        additive = _additive(same[0])
        if additive is not None and _put_mask(graph, mask, same, additive):
            changed += len(same)
    return changed


def masks_read(graph: Graph, symbols: Symbols) -> tuple[str, ...]:
    """Return which kernels serve the attention calls that ``share-masks`` changes, at some sizes; nothing is computed.

    What a kernel reads in place of a boolean mask is its own: cuDNN's is given another number for "not allowed" in some releases.

    Args:
        graph: with open sizes.
        symbols: the size of each.
    """
    found = []
    for _, (call, *_) in _sharing(graph):
        operands = [attention_argument(call, name).meta["val"] for name in ATTENTION_ARGUMENTS[:4]]
        found.append(aten_ops.attention_kernel(*fake_mode.lying_at(operands, symbols), **_options(call)))
    return tuple(found)


def _sharing(graph: Graph) -> list[tuple[Node, list[Node]]]:
    """Return the boolean masks that several calls of one layout read, each with these calls."""
    theirs = {key for node in graph.nodes for key in written_storages(node)}
    groups: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        mask = attention_argument(node, "attn_mask") if node.target is ATTENTION else None
        if not isinstance(mask, Node) or attention_argument(node, "is_causal") or attention_argument(node, "dropout_p"):
            continue
        value = mask.meta["val"]
        if value.dtype != torch.bool or theirs.intersection(storages(mask)):
            continue
        if symbolic_sizes.is_symbolic(value) and not _reads_a_tensor(mask):  # at some sizes it says no more than a flag
            continue
        query = attention_argument(node, "query").meta["val"]
        groups.setdefault((mask, query.dtype, query.device), []).append(node)
    found = [(mask, [call for call in calls if _layouts(call) == _layouts(calls[0])]) for (mask, *_), calls in groups.items()]
    return [(mask, same) for mask, same in found if len(same) > 1]


def _reads_a_tensor(mask: Node) -> bool:
    """Whether a mask follows from more than sizes."""
    seen, waiting = {mask}, [mask]
    for node in waiting:
        if node.op in ("placeholder", "get_attr"):
            return True
        fresh = [one for one in node.all_input_nodes if one not in seen and not symbolic_sizes.is_size(one.meta.get("val"))]
        seen.update(fresh)
        waiting += fresh
    return False


def group_query_heads(graph: Graph, _region: Region, _constants: dict[str, torch.Tensor]) -> int:
    """Let attention read the shared KV heads itself (``enable_gqa``) instead of copying them once per query head.

    A single KV head that broadcasts, with no mask, is shared in the same way: ``drop-masks`` comes first.
    """
    changed = 0
    for node in graph.nodes:
        if node.target is not ATTENTION or node.kwargs.get("enable_gqa"):
            continue
        key, value = unrepeated(attention_argument(node, "key")), unrepeated(attention_argument(node, "value"))
        if key is None or value is None:
            if _shares_one_head(node):
                node.kwargs = {**node.kwargs, "enable_gqa": True}
                changed += 1
            continue
        arguments = list(node.args)
        arguments[1], arguments[2] = key, value
        node.args, node.kwargs = tuple(arguments), {**node.kwargs, "enable_gqa": True}
        changed += 1
    return changed


def _shares_one_head(call: Node) -> bool:
    """Whether the only KV head of an attention call broadcasts over several query heads, with no mask.

    No kernel for GPUs takes ``enable_gqa`` and a mask. With dropout a kernel would draw other numbers than the formula.
    """
    operands = [attention_argument(call, name) for name in ATTENTION_ARGUMENTS[:3]]
    if attention_argument(call, "attn_mask") is not None or attention_argument(call, "dropout_p"):
        return False
    query, key, value = (one.meta["val"].shape for one in operands)
    if not len(query) == len(key) == len(value) == 4 or not query[0] == key[0] == value[0]:
        return False
    return bool(key[1] == value[1] == 1 < query[1])


def masked_calls(graph: Graph) -> dict[Node, Node]:
    """Return the attention calls that are given a mask, each with it."""
    calls = [node for node in graph.nodes if node.target is ATTENTION and not attention_argument(node, "is_causal")]
    masks = {node: attention_argument(node, "attn_mask") for node in calls}
    return {node: mask for node, mask in masks.items() if isinstance(mask, Node)}


def put_flag(call: Node, meaning: str) -> None:
    """Give an attention call a flag in place of its mask.

    Args:
        call: of ``scaled_dot_product_attention``.
        meaning: of its mask: ``causal`` or ``all true``.
    """
    arguments = [attention_argument(call, name) for name in ATTENTION_ARGUMENTS]
    arguments[3], arguments[5] = None, meaning == "causal"
    arguments[4] = arguments[4] or 0.0
    call.args, call.kwargs = (
        tuple(arguments),
        {name: value for name, value in call.kwargs.items() if name not in ATTENTION_ARGUMENTS},
    )


def _additive(call: Node) -> torch.Tensor | None:
    """Return the additive mask that a call makes of a boolean one that holds both values; None where it makes no such mask."""
    query, key, value, mask = (_any_like(attention_argument(call, name).meta["val"]) for name in ATTENTION_ARGUMENTS[:4])
    if bool(mask.all()):  # one key: what stands for "not allowed" cannot be seen
        return None
    made = aten_ops.mask_in_attention(query, key, value, mask, **_options(call))
    is_mask = made is not None and torch.equal(made, torch.where(mask, 0.0, made.min()))
    return made if is_mask else None


def _any_like(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a layout, expanded ones too, of open sizes as in the captured call: zeros, or a mask of both values."""
    laid = symbolic_sizes.at_example(value)
    memory = torch.zeros(extent(laid), dtype=value.dtype, device=value.device)
    if value.dtype == torch.bool:
        memory[::2] = True
    return memory.as_strided(laid.shape, laid.stride())


def _layouts(call: Node) -> tuple[Any, ...]:
    values = [attention_argument(call, name).meta["val"] for name in ATTENTION_ARGUMENTS[:3]]
    return (*map(symbolic_sizes.layout_key, values), *sorted(_options(call).items()))


def _options(call: Node) -> dict[str, Any]:
    return {name: value for name, value in call.kwargs.items() if name not in ATTENTION_ARGUMENTS}


def _put_mask(graph: Graph, mask: Node, calls: list[Node], additive: torch.Tensor) -> bool:
    """Give calls the additive mask; whether it lies as the boolean one, or row by row, at any size."""
    like, first = mask.meta["val"], calls[0]
    rows = [math.prod(like.shape[dim + 1 :]) for dim in range(like.dim())]
    # What torch.where returns on fake tensors would ask whether a size is 1.
    laid = (like.new_empty_strided(like.shape, stride, dtype=additive.dtype) for stride in (like.stride(), rows))
    result = next((one for one in laid if has_strides(symbolic_sizes.at_example(one), additive.stride())), None)
    if result is None:
        return False
    origin: dict[str, Any] = {key: first.meta[key] for key in ("nn_module_stack", "stack_trace") if key in first.meta}
    with graph.inserting_before(first):
        numbers = []
        for number in (0.0, float(additive.min())):
            options: dict[str, Any] = {"dtype": additive.dtype, "device": additive.device}
            scalar = graph.call_function(torch.ops.aten.scalar_tensor.default, (number,), options)
            scalar.meta = {**origin, "val": like.new_empty((), dtype=additive.dtype)}
            numbers.append(scalar)
        made = graph.call_function(torch.ops.aten.where.self, (mask, *numbers))
        made.meta = {**origin, "val": result}
    for call in calls:
        arguments = [attention_argument(call, name) for name in ATTENTION_ARGUMENTS[:4]]
        rest = call.args[4:]
        call.args = (*arguments[:3], made, *rest)
        call.kwargs = {name: value for name, value in call.kwargs.items() if name not in ATTENTION_ARGUMENTS[:4]}
    return True


def meaning_of(mask: torch.Tensor) -> str | None:
    """Return ``causal`` or ``all true`` where a mask says no more than that, element by element; None for any other."""
    allowed = mask
    if mask.dtype != torch.bool:
        blocked = mask <= torch.finfo(mask.dtype).min
        if not bool(((mask == 0) | blocked).all()):
            return None
        allowed = ~blocked
    if bool(allowed.all()):
        return "all true"
    queries, keys = allowed.shape[-2:]
    causal = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
    return "causal" if queries == keys and bool((allowed == causal).all()) else None


def unrepeated(node: object) -> Node | None:
    """Return k for ``reshape(expand(unsqueeze(k, 2), (B, H, n, S, D)), (B, H·n, S, D))``; None for anything else."""
    if not isinstance(node, Node) or node.target not in (torch.ops.aten.reshape.default, torch.ops.aten.view.default):
        return None
    expanded = node.args[0]
    if not isinstance(expanded, Node) or expanded.target is not torch.ops.aten.expand.default:
        return None
    unsqueezed = expanded.args[0]
    if not isinstance(unsqueezed, Node) or unsqueezed.target is not torch.ops.aten.unsqueeze.default or unsqueezed.args[1] != 2:
        return None
    source = unsqueezed.args[0]
    if not isinstance(source, Node):
        return None
    shapes = [item.meta["val"].shape for item in (source, expanded, node)]
    return source if is_repeat_of_heads(*shapes) else None


def is_repeat_of_heads(before: Sequence[int], wide: Sequence[int], after: Sequence[int]) -> bool:
    """Whether shapes are of KV heads, the same n times in a dim of their own, and n times as many heads.

    Args:
        before: (B, H, S, D).
        wide: (B, H, n, S, D).
        after: (B, H·n, S, D).
    """
    is_repeat = len(before) == 4 and len(wide) == 5 and len(after) == 4 and after[1] == before[1] * wide[2]
    return is_repeat and after[0] == before[0] and after[2:] == before[2:] and wide[:2] == before[:2] and wide[3:] == before[2:]


def _dropped_masks_ns(effect: PassEffect) -> int:
    """Attention is expected to run as long as eager's, which builds no mask, in as many launches."""
    capture = effect.capture
    ops = {op.index for op in capture.ops if op.target == _CAPTURED_ATTENTION} - set(effect.removed)
    traced = [launch for launch in capture.launches if launch.op_index in ops or launch.category == OpClass.ATTENTION]
    eager = [launch for launch in capture.eager_launches if launch.category == OpClass.ATTENTION]
    beyond_ns = sum(launch.duration_ns for launch in traced) - sum(launch.duration_ns for launch in eager)
    return effect.saved_ns + max(0, beyond_ns + (len(traced) - len(eager)) * effect.launch_cost_ns)


def _grouped_heads_ns(effect: PassEffect) -> int:
    """Attention of a single token does little more than read keys and values, and is expected to read fewer bytes.

    A kernel that serves what was the formula op by op is expected to take as long as the longest of its launches.
    """
    capture, unread_bytes, formula_ns = effect.capture, 0, 0
    for node, index, often in effect.nodes():
        if index is None or capture.ops[index].target != _CAPTURED_ATTENTION:
            continue
        before = [_read(capture, value) for value in capture.ops[index].args[1:3]]
        after = [value.meta["val"] for value in node.args[1:3] if isinstance(value, Node)]
        query = _read(capture, next(iter(capture.ops[index].args), None))
        if query is not None and query.shape[-2] == 1:
            unread_bytes += often * sum(read_bytes(one) for one in before if one is not None)
            unread_bytes -= often * sum(int(one.nbytes) for one in after)
        if node.kwargs.get("enable_gqa") and before[0] is not None and before[0].shape[1] == 1:
            formula_ns += _beyond_longest_ns(effect, index, often)
    return effect.saved_ns + max(0, round(effect.copy_ns(unread_bytes))) + formula_ns


def _beyond_longest_ns(effect: PassEffect, index: int, often: int) -> int:
    """Return how long an op takes beyond the longest of its launches, their cost included; 0 for an op that is one kernel."""
    took = [launch.duration_ns for launch in effect.capture.launches if launch.op_index == index]
    if len(took) <= often:
        return 0
    return sum(took) - often * max(took) + (len(took) - often) * effect.launch_cost_ns


def _read(capture: Capture, value: Arg) -> TensorMeta | None:
    return capture.ops[value.index].outputs[0] if isinstance(value, Ref) else None


def _shared_masks_ns(effect: PassEffect) -> int:
    """Kernels that turn a boolean mask into an additive one are expected to run for one call of all that share it."""
    capture, cost_ns = effect.capture, effect.launch_cost_ns
    calls = (op for op in capture.ops if op.target == _CAPTURED_ATTENTION and op.index not in effect.removed)
    masks = {op.index: mask for op in calls if (mask := _bool_source(capture, op)) is not None}
    made = [launch for launch in capture.launches if launch.op_index in masks and launch.category != OpClass.ATTENTION]
    repeated = 1 - len(set(masks.values())) / max(len(masks), 1)
    return effect.saved_ns + round(sum(launch.duration_ns + cost_ns for launch in made) * repeated)


def _bool_source(capture: Capture, op: OpNode) -> int | None:
    sources = [value.index for value in (*op.args, *(value for _, value in op.kwargs)) if isinstance(value, Ref)]
    return next((index for index in sources if capture.ops[index].outputs[0].dtype == "bool"), None)


DROP_MASKS = PassRewrite(id="drop-masks", title="causal mask → flag", apply=drop_masks, predict=_dropped_masks_ns)
GROUP_HEADS = PassRewrite(id="group-heads", title="grouped KV heads", apply=group_query_heads, predict=_grouped_heads_ns)
SHARE_MASKS = PassRewrite(
    id="share-masks",
    title="shared attention masks",
    apply=share_masks,
    reads_off=masks_read,
    predict=_shared_masks_ns,
    after={"drop-masks": "a mask that becomes a flag needs no additive form"},
)
