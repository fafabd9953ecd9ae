"""Changes of layouts in a graph with open sizes: linears that are merged, rows that nobody reads."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.capture.sizes.open_capture import OpenCapture
from fusion_advisor.fuse.passes.registry import LAYOUT_CHANGES
from fusion_advisor.fuse.rewrite.record import CopyRoom, LayoutRewrite
from fusion_advisor.fuse.shapes.sized_fusion import LooksAtSizes
from fusion_advisor.runtime.torch_internals import symbolic_sizes


def change_layouts(opened: OpenCapture, ids: Collection[str]) -> None:
    """Change a piece's graph as a plan says.

    Args:
        opened: the piece's graph.
        ids: of the changes.

    Raises:
        LooksAtSizes: as :func:`changed_region`.
    """
    for rewrite in LAYOUT_CHANGES.values():
        region = changed_region(opened, rewrite) if rewrite.id in ids else None
        if region is not None:
            opened.live.regions[0] = region


def changed_region(opened: OpenCapture, rewrite: LayoutRewrite) -> Region | None:
    """Return a piece's graph with a change of layouts that serves all of its sizes; None where there is nothing to change.

    Weights that do not lie side by side stay as they are: only the example's plan may hold a copy of them.

    Args:
        opened: the piece's graph.
        rewrite: the change.

    Raises:
        LooksAtSizes: it asked dynamo for the number that stands for an open size; this graph must not be used any more.
    """
    before = _assumed(opened)
    with symbolic_sizes.ones_among_the_sizes():  # as in the trace: else each op of fewer rows asks whether a size is 1
        changed = next((one for (one,) in rewrite.change([opened.region], CopyRoom()) if one.changed), None)
    # A graph that was read from a file does not know yet what its trace took for granted.
    if not _assumed(opened) - before <= set(opened.guards):
        raise LooksAtSizes(rewrite.id)
    return None if changed is None else changed.region


def _assumed(opened: OpenCapture) -> set[Any]:
    """Return what dynamo takes for granted of the sizes: guards, and symbols that it has replaced."""
    environment = opened.environment
    return set() if environment is None else {*symbolic_sizes.guards_of(environment), *environment.replacements}
