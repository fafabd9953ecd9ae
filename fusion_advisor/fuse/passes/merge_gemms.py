"""GEMM merging: linears that read one input (q/k/v, gate/up) become one GEMM whose output is read in slices.

One GEMM of 4608 columns fills the device better than three of 3584, 512 and 512, and at batch 1 one GEMV reads the same bytes in
one launch. The merged weight is a view where the weights already lie one after the other in memory (``weight_packing`` lays
them so for models that we load): there is no copy, and the step sees every write to a weight. Weights that are not adjacent
need a copy, which is made only under ``--freeze``: it stays in memory, and writes through ``tensor.data`` do not reach it.

The slices have wider strides than the separate outputs had, so this pass makes a new region, on which chains are lowered again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fusion_advisor.capture.graph.fx_nodes import storages, written_storages
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.rewrite.derived_tensors import Held, Joined
from fusion_advisor.fuse.rewrite.record import CopyRoom, LayoutRewrite
from fusion_advisor.fuse.rewrite.region_copy import ChangedRegion, copy_of, layouts
from fusion_advisor.runtime.torch_internals import fake_mode
from fusion_advisor.workload.weight_packing import lie_together

_LINEAR = torch.ops.aten.linear.default
_SLICE = torch.ops.aten.slice.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Linears of one parent module that read one input."""

    linears: tuple[Node, ...]
    """In the order in which their columns are merged: that of the calls, or of the weights in memory."""
    first: Node
    """The one that is called first."""
    name: str = ""

    def in_memory_order(self, values: Mapping[Node, Any]) -> _Group:
        """Return the group ordered by its weights' addresses: models call siblings in another order than they hold them."""
        ordered = sorted(zip(self.operands(1), self.linears, strict=True), key=lambda pair: values[pair[0]].data_ptr())
        return replace(self, linears=tuple(linear for _, linear in ordered))

    def operands(self, position: int) -> list[Node]:
        """Return the weights (1) or the biases (2)."""
        found = [linear.args[position] for linear in self.linears if len(linear.args) > position]
        return [operand for operand in found if isinstance(operand, Node)]


class _CannotView(Exception):
    """An op downstream needs an output that is not a slice; carries the storage it read."""

    def __init__(self, key: int, target: str) -> None:
        super().__init__(target)
        self.key = key


def merge_linears(region: Region, *, may_copy: bool = False) -> ChangedRegion:
    """Merge linears that read the same input, in a copy of a region.

    Linears belong together when they read one value that nobody writes to in between, their weights are distinct parameters of
    one dtype whose owners are children of one module (an adapter's own linears, as LoRA adds, are nobody's siblings), and all or
    none have a bias.

    Args:
        region: named, with the tensors of a call; left as it is.
        may_copy: hold a merged copy of weights that do not lie one after the other.
    """
    excluded: dict[tuple[str, ...], str] = {}
    while True:
        result = copy_of(region)
        values = dict(zip(_placeholders(result.region), region.example_args, strict=True))
        owners: dict[int, _Group] = {}
        dirty: set[Node] = set()
        stale: set[int] = set()
        for group in (found.in_memory_order(values) for found in _groups(result.region)):
            reason = excluded.get(_names(group)) or _why_not(group, values, may_copy=may_copy)
            if reason is not None:
                result.refusals.append(f"{group.name}: {reason}")
                continue
            stale.update(key for linear in group.linears for key in storages(linear))
            merged, slices = _merge(result, group, values)
            owners[storages(merged)[0]] = group
            dirty.update(slices)
        try:
            _update_layouts(result.region, dirty, set(owners), stale)
        except _CannotView as failure:
            group = owners[failure.key]
            excluded[_names(group)] = f"{failure} cannot read a slice of the merged output"
            continue
        graph = result.region.graph.graph
        graph.lint()
        result.region.graph.recompile()
        return result


def _placeholders(region: Region) -> list[Node]:
    return [node for node in region.graph.graph.nodes if node.op == "placeholder"]


def _names(group: _Group) -> tuple[str, ...]:
    return tuple(node.name for node in group.linears)


def _groups(region: Region) -> list[_Group]:
    placeholders = _placeholders(region)
    parameters = {
        node: name for node, name, role in zip(placeholders, region.names, region.roles, strict=True) if role == "parameter"
    }
    families: dict[tuple[Any, ...], list[Node]] = {}
    for node in region.graph.graph.nodes:
        if node.target is not _LINEAR or node.kwargs:
            continue
        source, weight = node.args[0], node.args[1]
        bias = node.args[2] if len(node.args) > 2 else None
        if weight not in parameters or (bias is not None and bias not in parameters):
            continue
        parent = parameters[weight].rpartition(".")[0].rpartition(".")[0]
        layout = weight.meta["val"]
        families.setdefault((source, parent, bias is None, layout.dtype, layout.device), []).append(node)
    position = {node: number for number, node in enumerate(region.graph.graph.nodes)}
    written = [(position[node], key) for node in position for key in written_storages(node)]
    groups = []
    for (source, parent, *_), linears in families.items():
        group = _Group(linears=tuple(linears), first=linears[0])
        weights = group.operands(1)
        if len(linears) < 2 or len(set(weights)) < len(weights):
            continue
        first, last = position[linears[0]], position[linears[-1]]
        read = {key for operand in [source, *weights] for key in storages(operand)}
        if any(first < at < last and key in read for at, key in written):
            continue
        leaves = [parameters[weight].removeprefix(f"{parent}.").removesuffix(".weight") for weight in weights]
        groups.append(replace(group, name=f"{parent}.{{{','.join(leaves)}}}".lstrip(".")))
    return groups


def _why_not(group: _Group, values: Mapping[Node, Any], *, may_copy: bool) -> str | None:
    if not all(node.meta["val"].is_contiguous() for node in group.linears):
        return "an output is not contiguous"
    for operands in (group.operands(1), group.operands(2)):
        tensors = [values[operand] for operand in operands]
        if tensors and not may_copy and not lie_together(tensors):
            held_bytes = sum(_bytes(values[operand]) for operand in (*group.operands(1), *group.operands(2)))
            return (
                "its weights are not adjacent in memory: `fusion_advisor.lay_out_weights(model)` moves them together, "
                f"and --freeze keeps a merged copy of {held_bytes:,} bytes"
            )
    return None


def _merge(result: ChangedRegion, group: _Group, values: Mapping[Node, Any]) -> tuple[Node, list[Node]]:
    graph, first = result.region.graph.graph, group.first
    like = first.meta["val"]
    origin: dict[str, Any] = {key: first.meta[key] for key in ("nn_module_stack", "stack_trace") if key in first.meta}
    number = result.changed = result.changed + 1
    with graph.inserting_before(first):
        operands = []
        for kind, nodes in (("weight", group.operands(1)), ("bias", group.operands(2))):
            if not nodes:
                continue
            tensors = [values[node] for node in nodes]
            name = f"{_MERGED}{kind}_{result.region.index}_{number}"
            if lie_together(tensors):
                call: Joined | Held = Joined(name, tensors)
            else:
                call = Held(name, lambda *parts: torch.cat([part.detach() for part in parts]), tensors)
                result.held_bytes += sum(map(_bytes, tensors))
            rows = sum(tensor.shape[0] for tensor in tensors)
            operand = graph.call_function(call, tuple(nodes))
            operand.meta = {**origin, "val": nodes[0].meta["val"].new_empty((rows, *tensors[0].shape[1:]))}
            operands.append(operand)
        merged = graph.call_function(_LINEAR, (first.args[0], *operands))
        merged.meta = {**origin, "val": like.new_empty((*like.shape[:-1], operands[0].meta["val"].shape[0]))}
        slices, start = [], 0
        for linear in group.linears:
            end = start + linear.meta["val"].shape[-1]
            part = graph.call_function(_SLICE, (merged, -1, start, end))
            part.meta = {**linear.meta, "val": merged.meta["val"][..., start:end]}
            slices.append(part)
            start = end
    for linear, part in zip(group.linears, slices, strict=True):
        linear.replace_all_uses_with(part)
        graph.erase_node(linear)
    return merged, slices


def _update_layouts(region: Region, dirty: set[Node], merged: set[int], stale: set[int]) -> None:
    """Run the ops downstream of the slices on fake tensors again, as far as their layouts or memory are other ones now.

    Args:
        region: its nodes get new ``meta["val"]``.
        dirty: the slices; gets every node that changed.
        merged: storages of the merged outputs.
        stale: storages of what is no longer computed: a value that lay there lies elsewhere now.

    Raises:
        _CannotView: an op refuses the new strides.
    """
    origin = {key: key for key in merged}
    for node in region.graph.graph.nodes:
        if node.op != "call_function" or node in dirty or not dirty.intersection(node.all_input_nodes):
            continue
        before = node.meta.get("val")
        try:
            after = fake_mode.fake_result(region.graph, node)
        except (RuntimeError, ValueError) as error:  # a view op on fake tensors raises either
            key = next(key for source in node.all_input_nodes if source in dirty for key in storages(source))
            raise _CannotView(origin[key], str(node.target)) from error
        left = storages(node)
        node.meta["val"] = after
        owned = storages(node)
        is_elsewhere = origin.keys() & set(owned) or stale & set(left)
        if not is_elsewhere and layouts(before) == layouts(after):
            node.meta["val"] = before
            continue
        stale.update(left)
        source = next(key for source in node.all_input_nodes if source in dirty for key in storages(source))
        origin.update({key: origin[source] for key in owned if key not in origin})
        dirty.add(node)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def merge_all(regions: Sequence[Region], room: CopyRoom) -> list[list[ChangedRegion]]:
    """Merge linears in a copy of every region; weights that are not adjacent are copied where copies of all of them would fit."""
    weights = sum(
        value.numel() * value.element_size()
        for region in regions
        for value, role in zip(region.example_args, region.roles, strict=True)
        if role == "parameter"
    )
    may_copy = room.may_copy and weights < room.free_bytes
    return [[merge_linears(region, may_copy=may_copy) for region in regions]]


MERGE_GEMMS = LayoutRewrite(
    id="merge-gemms",
    title="merged GEMMs",
    change=merge_all,
    suffix="merged",
    copies_weights=True,
    serves_other_shapes=True,
    after={"narrow-rows": "a narrowed linear reads other rows than its siblings, and is merged with none of them"},
)


_MERGED = "merged_"


def is_merged_operand(target: object) -> bool:
    """Whether a node's target joins the weights or biases of merged GEMMs, along their first dim.

    Args:
        target: of a node.
    """
    return not isinstance(target, torch._ops.OpOverload) and getattr(target, "__name__", "").startswith(_MERGED)
