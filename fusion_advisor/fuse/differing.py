"""What a rewrite that changes more than chains is expected to save: the ops in which two steps differ, timed by themselves.

Merged GEMMs, rows left out, activations in epilogues and GEMV kernels take the place of ops and of fused calls alike, so what
they save is no difference of two chains. The two steps' graphs tell it: what stands in one and not in the other runs by itself,
all layers in a row (one layer's weight alone would stay in the cache), on the model's own weights and random activations.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.capture.graph import Region
from fusion_advisor.capture.nodes import tensors_of, written_storages
from fusion_advisor.fuse.bench import Step
from fusion_advisor.fuse.decide import StepRunner
from fusion_advisor.timing import measure
from fusion_advisor.timing.stopwatch import median_interval
from fusion_advisor.workload.device import is_out_of_memory

_BUDGET_S = 0.5
_ROUNDS = 60


def saving_alone_ns(runner: StepRunner, before: Step, after: Step) -> int | None:
    """Return what the ops in which two steps differ take in the one beyond what they take in the other.

    Args:
        runner: of the step; it tells how such calls are timed.
        before: a step.
        after: the same with one more rewrite; its regions stand for those of ``before``, in order.

    Returns:
        Nanoseconds per step, negative where the second takes longer; None where the ops cannot run by themselves: they write to
        what the model holds, stand in a graph that switches autocast, or do not fit into memory beside the model.
    """
    saving_ns = 0
    runs = before.bench.live.runs_of_regions()
    pairs = zip(_regions(before), _regions(after), runs, strict=True)
    for (region, module), (region_after, module_after), often in pairs:
        known: dict[Hashable, torch.Tensor] = {}
        one, other = _only_in(module, module_after), _only_in(module_after, module)
        if not one and not other:
            continue
        if _switches(module) or any(map(written_storages, [*one, *other])):
            return None
        try:
            calls = [_alone(region, module, one, known), _alone(region_after, module_after, other, known)]
            recorded = runner.recorded(calls)
            times = measure.interleave(
                recorded, rounds=_ROUNDS, budget_s=_BUDGET_S, on_cuda=runner.on_cuda, rest=runner.rest(recorded)
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        finally:
            runner.forget()
        took_ns, takes_ns = (median_interval(series)[0] for series in times)
        saving_ns += round(took_ns - takes_ns) * often
    return saving_ns


def _regions(step: Step) -> Iterable[tuple[Region, GraphModule]]:
    return zip(step.bench.live.regions, step.variant.modules, strict=True)


def _only_in(module: GraphModule, other: GraphModule) -> list[Node]:
    """Return the ops of a graph that another does not have, in order; items of a list go with the op that returns it."""
    there = {_key(node) for node in other.graph.nodes}
    chosen: set[Node] = set()
    for node in module.graph.nodes:
        is_item = node.target is operator.getitem and node.args[0] in chosen
        if is_item or (node.op == "call_function" and node.target is not operator.getitem and _key(node) not in there):
            chosen.add(node)
    return [node for node in module.graph.nodes if node in chosen]


def _key(node: Node) -> Hashable:
    """Tell an op by its name in the captured graph, a fused call by what it stands for, and both by the layout of the result."""
    name = (node.meta["fusion_id"], node.meta["replaces"]) if "fusion_id" in node.meta else (node.target, node.name)
    return name, tuple(map(_layout, tensors_of(node.meta.get("results", node.meta.get("val")))))


def _layout(value: torch.Tensor) -> Hashable:
    return tuple(value.shape), value.stride(), value.dtype, value.device


def _switches(module: GraphModule) -> bool:
    return any(getattr(node.target, "__name__", "") == "_enter_autocast" for node in module.graph.nodes)


def _alone(region: Region, module: GraphModule, nodes: list[Node], known: dict[Hashable, torch.Tensor]) -> Callable[[], Any]:
    """Return a call of these ops: on the region's own parameters, buffers and inputs, and on random values in between."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    own = dict(zip(placeholders, region.example_args, strict=True))
    graph, copies, given = Graph(), {}, []
    mine = set(nodes)
    for source in dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in mine):
        copies[source] = graph.placeholder(source.name)
        if source in own:
            given.append(own[source])
        elif source.op == "get_attr":
            given.append(getattr(module, str(source.target)))
        else:
            given.append(_random(source.meta["val"], known))
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(None)  # so that each result is freed behind the last op that reads it
    alone = GraphModule(torch.nn.Module(), graph, class_name="Alone")

    def call() -> None:
        with torch.no_grad():
            alone(*given)

    return call


def _random(value: torch.Tensor, known: dict[Hashable, torch.Tensor]) -> torch.Tensor:
    """Return a tensor of this layout, one for all that have it: normal, or zeros where it holds no floats."""
    key = _layout(value)
    if key not in known:
        extent = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
        extent = extent if value.numel() else 0
        made = torch.zeros(extent, dtype=value.dtype, device=value.device)
        if value.is_floating_point():
            own = torch.Generator(value.device).manual_seed(len(known))  # the user's random numbers go on as if this had not run
            made = torch.randn(extent, generator=own, device=value.device).to(value.dtype)
        known[key] = made.as_strided(value.shape, value.stride())
    return known[key]
