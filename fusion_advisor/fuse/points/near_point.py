"""What runs near one point of a piece: the piece's graph with rewrites in it, and what depends on sizes settled there."""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import GraphModule

from fusion_advisor.capture.sizes.open_capture import Sizes
from fusion_advisor.fuse.passes.attention import DROP_MASKS
from fusion_advisor.fuse.passes.flash_attention import FLASH
from fusion_advisor.fuse.rewrite.record import PointRewrite
from fusion_advisor.fuse.shapes.pieces import Served
from fusion_advisor.fuse.shapes.size_values import flagged, keep_size_values
from fusion_advisor.fuse.shapes.sized_fusion import Workpiece


def finished(
    work: Workpiece, module: GraphModule, sizes: Sizes, passes: Collection[str], *, flash: PointRewrite = FLASH
) -> Served:
    """Return what runs near one point: values of sizes are kept for each shape, and masks become flags where they say no more.

    Args:
        work: the piece.
        module: from :func:`sized_fusion.build`; changed.
        sizes: of the point.
        passes: ids of those that stay there.
        flash: puts flash attention in, where ``passes`` name it.
    """
    places = work.opened.places()
    names = [places[name].name for name in work.names]
    with_flags = DROP_MASKS.id in passes
    found = flagged(module, names, [sizes[name] for name in work.names]) if with_flags else None
    served = Served(sizes=sizes, module=module)
    if found is not None:
        served = Served(sizes=sizes, module=found[0], plain=module, says_flags=found[1])
    for graph_module in served.modules:
        if flash.id in passes and flash.apply(graph_module.graph, work.opened.symbols(sizes)):
            graph_module.recompile()
        keep_size_values(graph_module)
    return served
