"""What runs near one point of a piece: its graph with rewrites in it, and what depends on sizes and masks settled there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from torch.fx import Graph, GraphModule

from fusion_advisor.capture.graph.fx_nodes import ATTENTION, attention_argument
from fusion_advisor.capture.sizes.open_capture import Sizes
from fusion_advisor.fuse.dependence.masks_of_ones import SKIP_MASKS, mask_inputs, meanings_with_ones
from fusion_advisor.fuse.passes.attention import DROP_MASKS, masked_calls, put_flag
from fusion_advisor.fuse.passes.flash_attention import FLASH, use_flash
from fusion_advisor.fuse.shapes.pieces import Served
from fusion_advisor.fuse.shapes.size_values import flagged, keep_size_values
from fusion_advisor.fuse.shapes.sized_fusion import Workpiece
from fusion_advisor.runtime.torch_internals import fx_trace
from fusion_advisor.runtime.torch_internals.symbolic_sizes import Symbols

PutFlash = Callable[[Graph, Symbols, Mapping[Any, Any]], int]


def finished(
    work: Workpiece, module: GraphModule, sizes: Sizes, passes: Collection[str], *, flash: PutFlash = use_flash
) -> Served:
    """Return what runs near one point: values of sizes are kept for each shape, and masks become flags where they say no more.

    Args:
        work: the piece.
        module: from :func:`sized_fusion.build`; changed.
        sizes: of the point.
        passes: ids of those that stay there.
        flash: puts flash attention into a graph, at some sizes.
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
    if SKIP_MASKS.id in passes:
        served = without_masks(work, served) or served
    return (flashed(work, served, flash) or served) if FLASH.id in passes else served


def without_masks(work: Workpiece, served: Served) -> Served | None:
    """Return what runs near a point with a graph of its own for calls whose masks hold ones; None where that changes no call.

    Args:
        work: the piece.
        served: without it; its graphs stay as they are.
    """
    region = work.opened.region
    masks = mask_inputs(region)
    masked = masked_calls(region.graph.graph) if masks and served.module is not None else {}
    meanings = meanings_with_ones(masked, masks, work.opened.dims_of_symbols())
    said = {call.name: meaning for call, meaning in meanings.items()}
    if served.module is None or not said:
        return None
    copied = fx_trace.copied_graph(served.module)
    calls = [node for node in copied.graph.nodes if node.target is ATTENTION and node.name in said]
    changed = [call for call in calls if attention_argument(call, "attn_mask") is not None]
    for call in changed:
        put_flag(call, said[call.name])
    if not changed:
        return None
    copied.graph.eliminate_dead_code()
    copied.recompile()
    return replace(served, unmasked=copied, masks=tuple(masks.values()))


def flashed(work: Workpiece, served: Served, flash: PutFlash = use_flash) -> Served | None:
    """Return what runs near a point with flash attention; None where that changes no call.

    Args:
        work: the piece.
        served: without it; its graphs stay as they are.
        flash: puts it into a graph, at some sizes.
    """
    symbols, dims, count = work.opened.symbols(served.sizes), work.opened.dims_of_symbols(), 0
    changed: list[GraphModule | None] = []
    for module in (served.module, served.plain, served.unmasked):
        copied = None if module is None else fx_trace.copied_graph(module)
        changed.append(copied)
        if copied is not None and (sites := flash(copied.graph, symbols, dims)):
            copied.recompile()
            count += sites
    return replace(served, module=changed[0], plain=changed[1], unmasked=changed[2]) if count else None
