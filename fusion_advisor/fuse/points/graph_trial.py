"""A call at a point as it will run in CUDA graphs, to time it: graphs of its own, given back afterwards.

The call is recorded as served calls are: in one graph, or in segments where it has a growing cache. What it passes is copied in
ahead of each replay, and its results are copied out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from fusion_advisor.capture.graph.tracer import DynamoCall, Route
from fusion_advisor.capture.sizes.open_capture import OpenCapture
from fusion_advisor.fuse.cuda_graph.graphed_region import GraphedRegion
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.cuda_graph.segmented_region import Cutter
from fusion_advisor.fuse.live.call_signature import signature
from fusion_advisor.fuse.plan.size_ranges import CACHED
from fusion_advisor.fuse.shapes.pieces import hold_ones
from fusion_advisor.fuse.shapes.ranged_calls import RangedCall


def after_a_look(masks: Sequence[int], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return what looks at masks, as a call does that may run another graph without them, and then runs a graph.

    Args:
        masks: places of inputs; without any nothing is looked at.
        run: the graph.
    """
    if not masks:
        return run

    def looking(*given: Any) -> Any:
        hold_ones(given, masks)
        return run(*given)

    return looking


@dataclass(slots=True, kw_only=True)
class GraphTrial:
    """A call that is recorded at its second use and replayed from then on, each time with the same tensors."""

    route: Route
    compiled: DynamoCall
    region: GraphedRegion
    leaves: Sequence[torch.Tensor]
    masks: Sequence[int] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the call."""
        self.route.forward = after_a_look(self.masks, self.region)
        return self.region.graphs.run(self.region, self.leaves, lambda: self.compiled.call(*args, **kwargs))

    @property
    def refusal(self) -> str:
        """Why it cannot be recorded; empty where it can, or is not to be: its results are large."""
        return self.region.refusal or self.region.graphs.too_large

    @property
    def is_recorded(self) -> bool:
        """Whether it is replayed; else it runs launch by launch."""
        return self.region.graphs.is_recorded(self.region)


@contextlib.contextmanager
def in_graphs(
    opened: OpenCapture, module: GraphModule, ranged: RangedCall, call: tuple[tuple[Any, ...], Mapping[str, Any]],
    graphs: Graphs | None, masks: Sequence[int] = (),
) -> Iterator[GraphTrial | None]:  # fmt: skip
    """Give what makes a call in CUDA graphs; None where there are none, or a call on a growing cache is not split.

    Args:
        opened: the capture that the graph was made of.
        module: the rewritten graph.
        ranged: the way in which the model is called.
        call: (args, kwargs) that will be timed, each time with these very tensors.
        graphs: take the recordings, and drop them in the end; None: none are to be tried.
        masks: places of inputs that each call looks at.
    """
    region = None if graphs is None else _region(opened, module, ranged, graphs)
    if graphs is None or region is None:
        yield None
        return
    route, compiled = opened.region.route, opened.live.compiled
    assert route is not None
    assert compiled is not None
    leaves: list[torch.Tensor] = []
    signature(call[0], call[1], leaves)
    try:
        yield GraphTrial(route=route, compiled=compiled, region=region, leaves=leaves, masks=masks)
    finally:
        graphs.forget()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the graphs are freed by now; their pool is given back only when this is asked for


def _region(opened: OpenCapture, module: GraphModule, ranged: RangedCall, graphs: Graphs) -> GraphedRegion | None:
    names = opened.region.names
    if ranged.may_record:
        return GraphedRegion(module, names, graphs, most_result_bytes=ranged.most_result_bytes, is_bounded=True)
    return Cutter(graphs, opened.symbols_of(CACHED)).region(module, names)
