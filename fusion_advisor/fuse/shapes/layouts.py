"""Changes of layouts in a graph with open sizes: values copied once for their readers, merged linears, rows that nobody reads.

The trace of one size puts such copies where they may help, and the example call says whether they do. A trace of open sizes has
none: so they are put into its graph here, by the same rules, which ask how a value lies at the sizes of the captured call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph import channels_last, contiguous_rows
from fusion_advisor.capture.graph.layout_copies import keep_copies, result_of
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.capture.sizes.open_capture import OpenCapture
from fusion_advisor.fuse.passes.registry import LAYOUT_CHANGES, PASSES
from fusion_advisor.fuse.rewrite.record import CopyRoom, LayoutRewrite
from fusion_advisor.fuse.rewrite.region_copy import ChangedRegion, copy_of
from fusion_advisor.fuse.shapes.pieces import Box
from fusion_advisor.fuse.shapes.sized_fusion import watched
from fusion_advisor.runtime.torch_internals import symbolic_sizes


def open_result(graph_module: GraphModule, node: Node) -> Any:
    """Return what a node returns on fake tensors of open sizes.

    A convolution in C++ asks for the batch, to choose its layout. It gives channels last where it reads them; its sizes stay.

    Args:
        graph_module: of the node.
        node: with what it returned before.
    """
    if node.target is channels_last.CONVOLUTION and channels_last.is_channels_last(node.all_input_nodes[0].meta["val"]):
        return node.meta["val"].contiguous(memory_format=torch.channels_last)
    return result_of(graph_module, node)


def copies_of(name: str, rule: Callable[[GraphModule], int]) -> LayoutRewrite:
    """Return the change that puts a rule's copies into graphs.

    Args:
        name: id of the rule, and of the graph pass that keeps its copies.
        rule: puts copies into a graph; returns how many.
    """

    def change(regions: Sequence[Region], _room: CopyRoom) -> Iterable[Sequence[ChangedRegion]]:
        changed = [copy_of(region) for region in regions]
        for one in changed:
            one.changed = rule(one.region.graph)
            keep_copies(one.region.graph.graph, name)
            one.region.graph.recompile()
        return [changed]

    return LayoutRewrite(id=name, title=PASSES[name].title, change=change, suffix="laid", serves_other_shapes=True)


_COPIES = (
    copies_of(contiguous_rows.ID, contiguous_rows.lay_rows_out),
    copies_of(channels_last.ID, functools.partial(channels_last.lay_channels_last, fake_result=open_result)),
)


def open_layouts() -> Mapping[str, LayoutRewrite]:
    """Return the changes of layouts for graphs with open sizes, by id, in the order in which they are made."""
    return {**{one.id: one for one in _COPIES}, **LAYOUT_CHANGES}


def change_layouts(opened: OpenCapture, ids: Collection[str], box: Box) -> None:
    """Change a piece's graph as a plan says.

    Args:
        opened: the piece's graph.
        ids: of the changes.
        box: the piece's sizes.

    Raises:
        LooksAtSizes: as :func:`changed_region`.
    """
    for rewrite in open_layouts().values():
        region = changed_region(opened, rewrite, box) if rewrite.id in ids else None
        if region is not None:
            opened.live.regions[0] = region


def changed_region(opened: OpenCapture, rewrite: LayoutRewrite, box: Box) -> Region | None:
    """Return a piece's graph with a change of layouts that serves all of its sizes; None where there is nothing to change.

    Weights that do not lie side by side stay as they are: only the example's plan may hold a copy of them.

    Args:
        opened: the piece's graph.
        rewrite: the change.
        box: the piece's sizes.

    Raises:
        LooksAtSizes: it asked dynamo for the number that stands for an open size; this graph must not be used any more.
    """
    # As in the trace: else each op of fewer rows asks whether a size is 1.
    with watched(rewrite.id, opened, box), symbolic_sizes.ones_among_the_sizes():
        changed = next((one for (one,) in rewrite.change([opened.region], CopyRoom()) if one.changed), None)
    return None if changed is None else changed.region
