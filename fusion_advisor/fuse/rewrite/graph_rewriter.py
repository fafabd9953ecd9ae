"""Write a plan into a copy of a captured graph: fused calls in place of chains, then the graph passes, then dead code out.

The captured graph itself is never changed, so every subset of rewrites can be built, timed and thrown away, and reverting is
dropping a copy. A fused call allocates its outputs with the strides that the original ops produced (later views depend on them)
and refuses inputs whose strides are not the ones that were verified.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.capture.graph.fx_nodes import storages, written_storages
from fusion_advisor.capture.graph.layout_copies import take_copies_out
from fusion_advisor.capture.graph.split_bias import join_bias
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.codegen.common.interface import Launcher
from fusion_advisor.fuse.rewrite.launch_count import Tally, mark
from fusion_advisor.records import TensorMeta
from fusion_advisor.runtime.torch_internals import fx_trace
from fusion_advisor.verify.guarded_memory import guarded
from fusion_advisor.verify.subgraph_oracle import has_strides

_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides, dtype."""


class LayoutChanged(RuntimeError):
    """A fused call got a tensor whose strides or dtype were never verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRewrite:
    """One site of one fusion: the nodes it replaces and the call that replaces them."""

    fusion_id: str
    members: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    call: Callable[..., Any]


GraphPass = Callable[[Graph, Region, dict[str, torch.Tensor]], int]
"""Rewrites a graph in place and returns the number of sites it changed; constants it makes go into the mapping."""


def fused_call(
    name: str,
    launch: Launcher,
    inputs: Sequence[TensorMeta],
    outputs: Sequence[TensorMeta],
    *,
    in_place: Sequence[int] = (),
    is_poisoned: bool = False,
) -> Callable[..., Any]:
    """Return a function of the input tensors that launches a bound kernel, counts that in its tally, and returns its output(s).

    Args:
        name: the kernel's entry point; the function carries it so that graph code and traces read well.
        launch: bound to the chain's sizes and strides.
        inputs: layouts that were verified, one per input operand, then one per output that is written in place.
        outputs: layouts to allocate, one per output operand.
        in_place: positions of the outputs that are not allocated: the last tensors of a call, which it writes into and returns.
        is_poisoned: fill the outputs with what no kernel writes first, so that an element left out cannot pass as right by
            what the memory happened to hold.

    Raises:
        LayoutChanged: (when called) an input has another shape, stride or dtype.
    """
    expected = tuple((meta.shape, meta.stride, getattr(torch, meta.dtype)) for meta in inputs)
    layouts = tuple((meta.shape, meta.stride, getattr(torch, meta.dtype)) for meta in outputs)
    # A launch costs the host 4 to 6 µs, an allocation nearly as much: `empty_like` takes three quarters of `empty_strided`.
    likes = tuple(-1 if is_poisoned or not _is_dense(layout) else _position(layout, expected) for layout in layouts)
    allocate = _Poisoned() if is_poisoned else torch.empty_strided
    verified = _Verified(name=name, launch=launch, inputs=expected, outputs=layouts, likes=likes, allocate=allocate)
    tally = Tally()
    if in_place:
        call = _writing_call(verified, frozenset(in_place), tally)
    else:
        call = _one_result_call(verified, tally) if len(layouts) == 1 else _many_results_call(verified, tally)
    call.__name__ = call.__qualname__ = name
    mark(call, tally)
    return call


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verified:
    """A bound kernel with the layouts that were verified."""

    name: str
    launch: Launcher
    inputs: tuple[_Layout, ...]
    outputs: tuple[_Layout, ...]
    likes: tuple[int, ...]
    """For each output the input that it is allocated like; -1 where there is none."""
    allocate: Callable[..., torch.Tensor]

    def refuse(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise LayoutChanged for the first tensor that has another layout; ``has_strides`` lets dims of one element differ."""
        for tensor, (shape, stride, dtype) in zip(tensors, self.inputs, strict=True):
            if tensor.shape != shape or tensor.dtype != dtype or not has_strides(tensor, stride):
                found = f"{tuple(tensor.shape)}, {tensor.stride()}, {tensor.dtype}"
                raise LayoutChanged(f"{self.name}: expected {shape} with strides {stride} in {dtype}, got {found}")


# Each of the three calls holds its own loop over the inputs: a function call more costs the host as much as the comparisons.


def _writing_call(verified: _Verified, in_place: frozenset[int], tally: Tally) -> Callable[..., Any]:
    """A call that writes into its last tensors and returns them."""
    expected, layouts, launch, allocate = verified.inputs, verified.outputs, verified.launch, verified.allocate
    read = len(expected) - len(in_place)

    def call(*tensors: torch.Tensor) -> Any:
        for tensor, (shape, stride, dtype) in zip(tensors, expected, strict=True):
            if tensor.stride() != stride or tensor.dtype != dtype or tensor.shape != shape:
                verified.refuse(tensors)
        device, given = tensors[0].device, iter(tensors[read:])
        results = [
            next(given) if position in in_place else allocate(shape, stride, dtype=dtype, device=device)
            for position, (shape, stride, dtype) in enumerate(layouts)
        ]
        tally.launches += 1
        launch(*tensors[:read], *results)
        return results[0] if len(results) == 1 else results

    return call


def _one_result_call(verified: _Verified, tally: Tally) -> Callable[..., Any]:
    expected, launch, allocate, empty_like = verified.inputs, verified.launch, verified.allocate, torch.empty_like
    (only,), (like,) = verified.outputs, verified.likes

    def call(*tensors: torch.Tensor) -> Any:
        for tensor, (shape, stride, dtype) in zip(tensors, expected, strict=True):
            if tensor.stride() != stride or tensor.dtype != dtype or tensor.shape != shape:
                verified.refuse(tensors)
        out = empty_like(tensors[like]) if like >= 0 else allocate(only[0], only[1], dtype=only[2], device=tensors[0].device)
        tally.launches += 1
        launch(*tensors, out)
        return out

    return call


def _many_results_call(verified: _Verified, tally: Tally) -> Callable[..., Any]:
    expected, launch, allocate, empty_like = verified.inputs, verified.launch, verified.allocate, torch.empty_like
    likes, layouts = verified.likes, verified.outputs

    def call(*tensors: torch.Tensor) -> Any:
        for tensor, (shape, stride, dtype) in zip(tensors, expected, strict=True):
            if tensor.stride() != stride or tensor.dtype != dtype or tensor.shape != shape:
                verified.refuse(tensors)
        device = tensors[0].device
        results = [
            empty_like(tensors[like]) if like >= 0 else allocate(shape, stride, dtype=dtype, device=device)
            for like, (shape, stride, dtype) in zip(likes, layouts, strict=True)
        ]
        tally.launches += 1
        launch(*tensors, *results)
        return results

    return call


def _position(layout: _Layout, layouts: Sequence[_Layout]) -> int:
    return layouts.index(layout) if layout in layouts else -1


def _is_dense(layout: _Layout) -> bool:
    """Whether the elements fill their memory without holes or overlaps: only then a like tensor has the same strides."""
    shape, stride, _ = layout
    return (
        1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) == math.prod(shape) > 0 and 0 not in stride
    )


class _Poisoned:
    """Allocates guarded outputs; what fills them changes from call to call, so that a kernel that reads it gives itself away."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, shape: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._calls += 1
        is_odd = bool(self._calls % 2)
        if dtype == torch.bool:
            poison: float | int = is_odd
        elif dtype.is_floating_point:
            poison = math.nan if is_odd else -3e4
        else:
            poison = torch.iinfo(dtype).max if is_odd else torch.iinfo(dtype).min
        return guarded(shape, stride, dtype, device, poison)


def rewrite_region(
    region: Region,
    index_of: Mapping[Node, int],
    sites: Sequence[SiteRewrite],
    passes: Sequence[GraphPass],
    *,
    is_lazy: bool = False,
) -> tuple[GraphModule, list[int]]:
    """Return a rewritten copy of a region and, per pass, how many sites it changed.

    Args:
        region: left as it is.
        index_of: index of each of the region's nodes.
        sites: rewrites of this region.
        passes: run after the chains, in order.
        is_lazy: generate its code when the copy is first called; whoever holds its ``forward`` pays for that in every call.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(region.graph.graph, copies))
    live = {index_of[original]: copy for original, copy in copies.items()}
    writes = [live[index] for site in sites for index in site.outputs if written_storages(live[index])]
    for site in sites:
        _replace_site(graph, site, live)
    # An op that writes is never dead code. Until all sites are replaced it shows where what it read had to be ready.
    for write in reversed(writes):
        graph.erase_node(write)
    constants: dict[str, torch.Tensor] = {}
    changed = [run_pass(graph, region, constants) for run_pass in passes]
    take_copies_out(graph)
    graph.eliminate_dead_code(is_impure_node=_is_impure)
    join_bias(graph)
    make = fx_trace.lazy_graph_module if is_lazy else GraphModule
    return make(_attributes(region.graph, constants), graph, class_name="FusedRegion"), changed


def _replace_site(graph: Graph, site: SiteRewrite, live: dict[int, Node]) -> None:
    members = {live[index] for index in site.members}
    first_reader = live[min(site.members)].next
    while first_reader in members or members.isdisjoint(first_reader.all_input_nodes):
        first_reader = first_reader.next
    originals = [live[index] for index in site.outputs]
    with graph.inserting_before(first_reader):
        call = graph.call_function(site.call, tuple(live[index] for index in site.inputs))
        call.meta = {key: originals[0].meta[key] for key in ("nn_module_stack", "stack_trace") if key in originals[0].meta}
        call.meta["fusion_id"] = site.fusion_id
        call.meta["replaces"] = tuple(original.name for original in originals)
        call.meta["results"] = [original.meta.get("val") for original in originals]
        call.meta["written"] = tuple(key for original in originals for key in written_storages(original))
        results = [call]
        if len(originals) > 1:
            results = [graph.call_function(operator.getitem, (call, number)) for number in range(len(originals))]
        replaced = dict(zip(originals, results, strict=True))
        for original, result in replaced.items():
            result.meta["val"] = original.meta.get("val")
        # Views that lie inside the chain but are read outside are made again on the fused value, and not before
        # the original: `type_as` reads a second value, which may be computed after the chain's first reader.
        for index in sorted(site.members):
            node = live[index]
            if node not in replaced and any(source in replaced and _shows(node, source) for source in node.all_input_nodes):
                with graph.inserting_before(max(first_reader, node)):
                    replaced[node] = graph.node_copy(node, lambda source: replaced.get(source, source))
    for original, result in replaced.items():
        original.replace_all_uses_with(result, delete_user_cb=lambda user: user not in members)
    for index, result in zip(site.outputs, results, strict=True):
        live[index] = result


def _shows(view: Node, source: Node) -> bool:
    """Whether a value lies in the memory of what it is made of."""
    return not set(storages(view)).isdisjoint(storages(source))


def _is_impure(node: Node) -> bool:
    if node.op in ("placeholder", "output") or node.meta.get("written"):
        return True
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    return node.is_impure()  # entering and leaving autocast, which no op reads


def _attributes(root: GraphModule, constants: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    holder = torch.nn.Module()
    for name, value in root.__dict__.get("_buffers", {}).items():
        holder.register_buffer(name, value, persistent=False)
    for name in {str(node.target) for node in root.graph.nodes if node.op == "get_attr"}:
        if "." not in name and not hasattr(holder, name):
            setattr(holder, name, getattr(root, name))
    for name, value in constants.items():
        holder.register_buffer(name, value, persistent=False)
    return holder
