"""A call on a growing cache as it will run in segments, to time it: CUDA graphs of its own, given back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule

from fusion_advisor.capture.graph.tracer import Route
from fusion_advisor.capture.sizes.open_capture import OpenCapture
from fusion_advisor.fuse.cuda_graph.recording import Recorder
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.cuda_graph.segmented_region import Cutter
from fusion_advisor.fuse.live.call_signature import signature
from fusion_advisor.fuse.plan.size_ranges import CACHED


@contextlib.contextmanager
def in_segments(
    route: Route, compiled: Callable[..., Any], module: GraphModule, opened: OpenCapture,
    call: tuple[tuple[Any, ...], Mapping[str, Any]], recorder: Recorder | None,
) -> Iterator[Callable[..., Any] | None]:  # fmt: skip
    """Give what makes a call in segments, recorded at its second use; None where it is not split.

    Args:
        route: from the compiled call to what runs in its graph's place.
        compiled: the model's call as dynamo compiled it.
        module: the rewritten graph.
        opened: the capture that it was made of.
        call: (args, kwargs) that will be timed, each time with these very tensors.
        recorder: of CUDA graphs; None: none are to be tried.
    """
    graphs = None if recorder is None else Graphs(recorder)
    region = None if graphs is None else Cutter(graphs, opened.symbols_of(CACHED)).region(module, opened.region.names)
    if graphs is None or region is None:
        yield None
        return
    leaves: list[torch.Tensor] = []
    signature(call[0], call[1], leaves)

    def segmented(*args: Any, **kwargs: Any) -> Any:
        route.forward = region
        return graphs.run(region, leaves, lambda: compiled(*args, **kwargs))

    try:
        yield segmented
    finally:
        graphs.forget()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the graphs are freed by now; their pool is given back only when this is asked for
