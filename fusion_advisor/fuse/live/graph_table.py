"""The backend that dynamo asks for a fused model: the rewritten graph for each graph that was verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from fusion_advisor.capture.graph.fx_nodes import code_digests
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.cuda_graph.graphed_region import GraphedRegion
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.slot.counters import Fallbacks
from fusion_advisor.runtime.torch_internals import dynamo, fake_mode


@dataclass(frozen=True, slots=True)
class RewrittenGraph:
    """What runs in place of one captured graph.

    Attributes:
        module: the rewritten graph.
        names: of its inputs.
        is_whole: it is the whole of a call, so that a CUDA graph may replay it.
    """

    module: GraphModule
    names: tuple[str, ...]
    is_whole: bool


_NOT_VERIFIED = "dynamo captured a graph that was not verified"


class GraphTable:
    """The rewritten graphs of a fused model, by the code and the input layouts of the graphs that they replace."""

    def __init__(self, graphs: Graphs | None, fallbacks: Fallbacks) -> None:
        """Begin with no graph.

        Args:
            graphs: replay CUDA graphs; None runs every call launch by launch.
            fallbacks: counts the calls for which dynamo captured another graph.
        """
        self._graphs = graphs
        self._fallbacks = fallbacks
        self._by_code: dict[Any, RewrittenGraph] = {}
        self._fake_modes: list[Any] = []
        self.handed_over = 0
        """How often dynamo got a rewritten graph."""
        self._others = 0
        self.runners: list[Callable[..., Any]] = []
        """What dynamo got, and the routes that it got for the capture."""

    @property
    def modules(self) -> list[GraphModule]:
        """The rewritten graphs."""
        return [graph.module for graph in self._by_code.values()]

    def compiled(self) -> int:
        """Return how often dynamo got a graph, a rewritten one or its own."""
        return self.handed_over + self._others

    def add(self, regions: Sequence[Region], modules: Sequence[GraphModule]) -> None:
        """Let rewritten graphs run in place of regions of one call."""
        for region, module in zip(regions, modules, strict=True):
            key = (region.digests or code_digests(region.original), _input_layouts(region.example_args))
            self._by_code[key] = RewrittenGraph(module, region.names, is_whole=len(regions) == 1)

    def include(self, other: GraphTable) -> None:
        """Take over the graphs of another table; a graph of this one stays."""
        self._by_code = {**other._by_code, **self._by_code}

    def redirect(self, regions: Sequence[Region], modules: Sequence[GraphModule]) -> None:
        """Let the captured call, which dynamo has compiled already, run rewritten graphs."""
        for region, module in zip(regions, modules, strict=True):
            self._redirect(region, RewrittenGraph(module, region.names, is_whole=len(regions) == 1))

    def _redirect(self, region: Region, graph: RewrittenGraph) -> None:
        route = region.route
        assert route is not None
        self.runners.append(route)

        def first(*args: Any) -> Any:
            self.handed_over += 1
            route.forward = self._runner(graph)
            return route.forward(*args)

        route.forward = first

    def backend(self, graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Return the rewritten graph for a graph that was verified, dynamo's own graph for any other."""
        found = self._by_code.get((code_digests(graph_module), _input_layouts(example_inputs)))
        if found is None:
            return self.other(graph_module, example_inputs)
        self._fake_modes += dynamo.fake_modes_of(graph_module)
        self.handed_over += 1
        runner = self._runner(found)
        self.runners.append(runner)
        return runner

    def other(self, graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Return dynamo's own graph for one that it traced where a piece of a range was to serve: the model has changed."""
        self._fake_modes += dynamo.fake_modes_of(graph_module)
        del example_inputs
        self._others += 1
        guard = failed_guard()
        forward = graph_module.forward if self._graphs is None else self._graphs.other(graph_module.forward)

        def run(*args: Any) -> Any:
            self._fallbacks.add(_NOT_VERIFIED, guard)
            return forward(*args)

        return run

    def _runner(self, graph: RewrittenGraph) -> Callable[..., Any]:
        if self._graphs is None:
            return graph.module.forward
        if not graph.is_whole:
            return self._graphs.other(graph.module.forward)
        return GraphedRegion(graph.module, graph.names, self._graphs)

    def forget_real_tensors(self) -> None:
        """Drop the weak references that dynamo's traces keep to the tensors that were traced."""
        fake_mode.forget_real_tensors(self._fake_modes)
        self._fake_modes.clear()


def failed_guard() -> str:
    """Say what dynamo found changed since the graph was verified; call it in dynamo's backend."""
    guard = dynamo.failed_guard()
    return f"its guard failed, `{guard}`" if guard else ""


def _input_layouts(values: Any) -> tuple[Any, ...]:
    return tuple(
        (tuple(value.shape), tuple(value.stride()), value.dtype) if isinstance(value, torch.Tensor) else type(value)
        for value in values
    )
