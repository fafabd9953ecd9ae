"""The values that rewritten graphs hold under ``--freeze``: made from which weights and buffers, of how many bytes."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule

from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.rewrite.derived_tensors import Held
from fusion_advisor.records import FrozenValue


def held_calls(module: GraphModule) -> list[Held]:
    """Return the calls of a rewritten graph that keep a value made from its sources."""
    return [node.target for node in module.graph.nodes if isinstance(node.target, Held)]


def frozen_values(regions: Sequence[Region], modules: Sequence[GraphModule]) -> tuple[FrozenValue, ...]:
    """List what graphs hold.

    Args:
        regions: as captured; their names are those of the sources.
        modules: what runs in their place.
    """
    found = []
    for region, module in zip(regions, modules, strict=True):
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        names = dict(zip(placeholders, region.names, strict=True))
        for node in module.graph.nodes:
            if isinstance(node.target, Held):
                sources = tuple(names[source] for source in node.all_input_nodes)
                found.append(FrozenValue(name=node.target.__name__, sources=sources, held_bytes=node.target.held_bytes))
    return tuple(found)
