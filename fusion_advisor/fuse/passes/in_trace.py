"""Rewrites that the trace is made with: copies in one layout, and biases that ops of their own add.

See ``capture.graph.contiguous_rows``, ``capture.graph.channels_last`` and ``capture.graph.split_bias`` for why, and for how they
come into the captured graph. Copies are timed when it is profiled, before kernels are made for the layouts that follow, and are
in every step after that. A bias stays with its small fp32 GEMM wherever no chain takes the addition.
"""

from __future__ import annotations

import functools

import torch
from torch.fx import Graph

from fusion_advisor.capture.graph import channels_last, contiguous_rows
from fusion_advisor.capture.graph.layout_copies import keep_copies
from fusion_advisor.capture.graph.split_bias import leave_gemm_biases_apart
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.rewrite.record import PassRewrite


def _keep(kind: str, graph: Graph, _region: Region, _constants: dict[str, torch.Tensor]) -> int:
    return keep_copies(graph, kind)


def _split_gemm_biases(graph: Graph, _region: Region, _constants: dict[str, torch.Tensor]) -> int:
    return leave_gemm_biases_apart(graph)


CONTIGUOUS_ROWS, CHANNELS_LAST, CONTIGUOUS_MASKS = (
    PassRewrite(id=kind, title=title, apply=functools.partial(_keep, kind), is_in_trace=True)
    for kind, title in (
        (contiguous_rows.ID, "contiguous rows"),
        (channels_last.ID, "channels last"),
        (contiguous_rows.MASKS_ID, "contiguous attention masks"),
    )
)
LAYOUTS = (CONTIGUOUS_ROWS.id, CHANNELS_LAST.id, CONTIGUOUS_MASKS.id)
SPLIT_BIASES = PassRewrite(id="split-biases", title="split GEMM biases", apply=_split_gemm_biases, is_in_trace=True)
