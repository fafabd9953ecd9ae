"""Contiguous rows: one copy of a permuted value in place of those that each op makes of what follows from it.

See ``capture.graph.row_layout`` for where the copies come into the captured graph. They are in every step that rewrites are timed
on, for kernels are made for the layouts that follow; the step with the copies alone is timed against the step without first.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from fusion_advisor.capture.graph.row_layout import keep_rows_laid_out
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.rewrite.record import PassRewrite


def keep_contiguous(graph: Graph, _region: Region, _constants: dict[str, torch.Tensor]) -> int:
    """Keep the copies that make rows contiguous; returns how many."""
    return keep_rows_laid_out(graph)


CONTIGUOUS_ROWS = PassRewrite(id="contiguous-rows", title="contiguous rows", apply=keep_contiguous, is_in_trace=True)
