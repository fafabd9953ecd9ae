"""Layouts of values: one copy in place of those that each op makes of what follows from it.

See ``capture.graph.contiguous_rows`` and ``capture.graph.channels_last`` for where the copies come into the captured graph. They
are timed when it is profiled, before kernels are made for the layouts that follow, and are in every step after that.
"""

from __future__ import annotations

import functools

import torch
from torch.fx import Graph

from fusion_advisor.capture.graph import channels_last, contiguous_rows
from fusion_advisor.capture.graph.layout_copies import keep_copies
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.rewrite.record import PassRewrite


def _keep(kind: str, graph: Graph, _region: Region, _constants: dict[str, torch.Tensor]) -> int:
    return keep_copies(graph, kind)


CONTIGUOUS_ROWS, CHANNELS_LAST, CONTIGUOUS_MASKS = (
    PassRewrite(id=kind, title=title, apply=functools.partial(_keep, kind), is_in_trace=True)
    for kind, title in (
        (contiguous_rows.ID, "contiguous rows"),
        (channels_last.ID, "channels last"),
        (contiguous_rows.MASKS_ID, "contiguous attention masks"),
    )
)
LAYOUTS = (CONTIGUOUS_ROWS.id, CHANNELS_LAST.id, CONTIGUOUS_MASKS.id)
