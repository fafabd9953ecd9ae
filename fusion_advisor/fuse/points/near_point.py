"""What runs near one point of a piece: the piece's graph with rewrites in it, and what depends on sizes settled there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch.fx import GraphModule

from fusion_advisor.capture.sizes.open_capture import Sizes
from fusion_advisor.fuse.passes.attention import DROP_MASKS
from fusion_advisor.fuse.passes.flash_attention import FLASH
from fusion_advisor.fuse.rewrite.record import PointRewrite
from fusion_advisor.fuse.shapes.pieces import Served
from fusion_advisor.fuse.shapes.size_values import flagged, keep_size_values
from fusion_advisor.fuse.shapes.sized_fusion import Workpiece
from fusion_advisor.runtime.torch_internals import fx_trace


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
    for one in served.modules:
        keep_size_values(one)
    return (flashed(work, served, flash) or served) if flash.id in passes else served


def flashed(work: Workpiece, served: Served, flash: PointRewrite = FLASH) -> Served | None:
    """Return what runs near a point with flash attention; None where that changes no call.

    Args:
        work: the piece.
        served: without it; its graphs stay as they are.
        flash: puts it in.
    """
    symbols, count = work.opened.symbols(served.sizes), 0
    changed: list[GraphModule | None] = []
    for module in (served.module, served.plain):
        copied = None if module is None else fx_trace.copied_graph(module)
        changed.append(copied)
        if copied is not None and (sites := flash.apply(copied.graph, symbols)):
            copied.recompile()
            count += sites
    return replace(served, module=changed[0], plain=changed[1]) if count else None
