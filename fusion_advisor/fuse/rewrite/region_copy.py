"""A copy of a captured region whose ops get other layouts or sizes: chains are lowered again on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.runtime.torch_internals import fx_trace, symbolic_sizes


@dataclass(slots=True)
class ChangedRegion:
    """A region with some rewrite in place, and what became of the nodes of the one it was made from."""

    region: Region
    copies: dict[Node, Node]
    """Each node of the original graph and its copy here."""
    changed: int = 0
    """Sites of the rewrite."""
    held_bytes: int = 0
    """Copies of weights that stay in memory; 0 where views suffice."""
    refusals: list[str] = field(default_factory=list)
    """One sentence for each site that was found and left alone."""


def copy_of(region: Region) -> ChangedRegion:
    """Return a copy that shares the region's tensors."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(region.graph.graph, copies))
    module = fx_trace.lazy_graph_module(region.graph, graph, class_name="ChangedRegion")
    copy = Region(
        index=region.index,
        graph=module,
        original=region.original,
        names=region.names,
        roles=region.roles,
        example_args=region.example_args,
        route=region.route,
    )
    return ChangedRegion(region=copy, copies=copies)


def layouts(value: Any) -> list[tuple[Any, ...]]:
    """Return the layout of an op's result, per tensor."""
    tensors: Sequence[Any] = value if isinstance(value, tuple | list) else [value]
    return [
        (*map(symbolic_sizes.expression_of, (*item.shape, *item.stride(), item.storage_offset())), item.dim(), item.dtype)
        if isinstance(item, torch.Tensor)
        else (item,)
        for item in tensors
    ]
