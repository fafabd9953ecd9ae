"""Split biases: an op of its own adds the bias of a small fp32 GEMM, where no chain takes the addition.

See ``capture.graph.split_bias`` for why the epilogue is the slower way, and for how the additions come into the captured graph.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from fusion_advisor.capture.graph.split_bias import leave_gemm_biases_apart
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.rewrite.record import PassRewrite


def split_gemm_biases(graph: Graph, _region: Region, _constants: dict[str, torch.Tensor]) -> int:
    """Split the biases from small fp32 GEMMs; returns how many."""
    return leave_gemm_biases_apart(graph)


SPLIT_BIASES = PassRewrite(id="split-biases", title="split GEMM biases", apply=split_gemm_biases, is_in_trace=True)
