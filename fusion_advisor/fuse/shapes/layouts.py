"""Changes of layouts in a graph with open sizes: those that serve every size, made as for the example call."""

from __future__ import annotations

from collections.abc import Collection

from fusion_advisor.capture.sizes.open_capture import OpenCapture
from fusion_advisor.fuse.passes.registry import LAYOUT_CHANGES
from fusion_advisor.fuse.rewrite.record import CopyRoom


def change_layouts(opened: OpenCapture, kept: Collection[str]) -> list[str]:
    """Change a piece's graph as the example's was, where the change serves other sizes; return the ids of the changes.

    Weights that do not lie side by side stay as they are: only the example's plan may hold a copy of them.
    """
    found = []
    for rewrite in LAYOUT_CHANGES.values():
        if not rewrite.serves_other_shapes or rewrite.id not in kept:
            continue
        (changed,) = next(iter(rewrite.change([opened.region], CopyRoom())))
        if changed.changed:
            opened.live.regions[0] = changed.region
            found.append(rewrite.id)
    return found
