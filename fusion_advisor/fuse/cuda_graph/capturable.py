"""What a rewritten region lets a CUDA graph do: whether it can be recorded, and what is put back after a replay in vain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.fx_nodes import source_of, storages, written_storages
from fusion_advisor.capture.graph.op_classes import is_collective
from fusion_advisor.fuse.rewrite.collective_kernels import GroupCall

UNDO_BYTES = 64 << 10
"""Of what a step writes to, as much is copied at each step so that it can be put back: a launch of two microseconds."""
_WAITING = frozenset({"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "unique_dim", "_unique2", "equal"})
"""Ops that hand a value to the host, or whose result's size does."""
_COPYING = frozenset(
    {"_to_copy", "to", "type_as", "copy_", "copy", "lift_fresh_copy", "cuda", "where", "index_put", "index_put_"}
)
"""Ops that copy even a single number from host memory; pointwise ops take it along as an argument of their kernel."""


_RECORDABLE_COLLECTIVES = "_c10d_functional."
_READING_SEEDS = frozenset({"_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward"})
"""Ops that read the seed of a dropout in host memory when they are launched, and on the device when they are recorded."""


def has_collectives(module: GraphModule) -> bool:
    """Whether a region has an op between processes."""
    return any(node.op == "call_function" and _meets_ranks(node) for node in module.graph.nodes)


def _meets_ranks(node: Node) -> bool:
    return isinstance(node.target, GroupCall) or is_collective(str(node.target))


def host_work(module: GraphModule, *, holds_collectives: bool = False) -> str | None:
    """Say which op of a region makes the host take part in the step, so that no graph can hold it; None when none does.

    An op between processes counts as one where the ranks do not record together: a replay on one rank alone would hang.

    Args:
        module: the region.
        holds_collectives: all ranks record and replay together, and what communicates is NCCL or a kernel of ours, which a graph
            can hold.
    """
    for node in module.graph.nodes:
        name = _op_name(node)
        if node.op != "call_function" or name == "getitem":
            continue
        if _meets_ranks(node):
            is_recordable = isinstance(node.target, GroupCall) or str(node.target).startswith(_RECORDABLE_COLLECTIVES)
            if holds_collectives and is_recordable:
                continue
            return f"processes meet in {place_of(node)}"
        if name in _WAITING:
            return f"the host waits for a value of the device in {place_of(node)}"
        devices = {value.device.type for value in _values(node)}
        for source in node.all_input_nodes:
            read = {value.device.type for value in _values(source)}
            if read == {"cuda"} and devices == {"cpu"}:
                return f"the host waits for a value of the device in {place_of(node)}"
            is_copied = source.op == "placeholder" or name in _COPYING or any(value.dim() for value in _values(source))
            if read == {"cpu"} and devices == {"cuda"} and is_copied:
                return (
                    f"`{source.target if source.op == 'placeholder' else source.name}` is read in host memory in {place_of(node)}"
                )
    return None


def seed_slots(module: GraphModule) -> tuple[int, ...]:
    """Return the inputs in which a backward pass is given the seeds of attention's dropout, by place.

    Attention of fp32 and of masks returns them in host memory when it is launched, and on the device when it is recorded. Its
    backward pass takes them for what they are in the same case. Launched with seeds of the device it reads them from the host,
    and a replay of it recorded with seeds of the host reads them from the device: both end the process or its CUDA context.

    Args:
        module: a backward pass, as AOTAutograd made it or rewritten.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    seeds = {seed for node in module.graph.nodes for seed in _seeds(node)}
    return tuple(slot for slot, node in enumerate(placeholders) if node in seeds)


def _seeds(node: Node) -> list[Node]:
    if not isinstance(node.target, torch._ops.OpOverload) or _op_name(node) not in _READING_SEEDS:
        return []
    names = [one.name for one in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if not given["dropout_p"]:
        return []
    return [one for one in (given["philox_seed"], given["philox_offset"]) if isinstance(one, Node)]


def has_host_seeds(module: GraphModule, args: Sequence[Any]) -> bool:
    """Whether a pass cannot be recorded because it is given seeds in host memory (:func:`seed_slots`).

    Args:
        module: the pass.
        args: of its call.
    """
    given = [args[slot] for slot in seed_slots(module)]
    return any(isinstance(one, torch.Tensor) and not one.is_cuda for one in given)


def writes_of(module: GraphModule) -> tuple[frozenset[int], bool]:
    """Return the inputs that a region writes to, by place, and whether it writes to nothing that outlives the call."""
    written = {key for node in module.graph.nodes for key in written_storages(node)}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    own = [node for node in module.graph.nodes if node.op == "get_attr"]
    slots = frozenset(slot for slot, node in enumerate(placeholders) if written & set(storages(node)))
    return slots, not slots and not any(written & set(storages(node)) for node in own)


def saved_inputs(module: GraphModule) -> tuple[int, ...] | None:
    """Return the inputs whose old contents must be known to undo a region, by place; None where they would not suffice.

    What the region appends needs none: rows that ``index_copy_``, or a fused call in its place, writes at places counted by an
    input that the region moves on.
    With the count put back they lie where nothing is stored yet, and the same call, run by the original ops, writes there again.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    appends: list[tuple[Node, list[Node]]] = []
    written: set[int] = set()
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.index_copy_.default or ("fusion_id" in node.meta and written_storages(node)):
            places = [source for source in node.all_input_nodes if any(one.dtype == torch.int64 for one in _values(source))]
            appends.append((node, places))
        else:
            written.update(written_storages(node))
    if any(written & set(storages(node)) for node in module.graph.nodes if node.op == "get_attr"):
        return None
    saved = [slot for slot, node in enumerate(placeholders) if written & set(storages(node))]
    counts = {placeholders[slot] for slot in saved}
    given = {key for node in placeholders for key in storages(node)}
    for node, places in appends:
        outlives = given & set(written_storages(node))
        if outlives and (outlives & written or not places or not all(counts & _ancestors(place) for place in places)):
            return None
    return tuple(saved)


def _ancestors(value: Node) -> set[Node]:
    found: set[Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _values(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [item for item in (value if isinstance(value, tuple | list) else [value]) if isinstance(item, torch.Tensor)]


def _op_name(node: Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.partition("::")[2]
    return getattr(node.target, "__name__", str(node.target))


def place_of(node: Node) -> str:
    """Name an op and the source line that it comes from, for a sentence."""
    file, line, text = source_of(node)
    where = f" at {file}:{line}" if file else ""
    return f"`{_op_name(node)}`{where}{f': {text}' if text else ''}"
