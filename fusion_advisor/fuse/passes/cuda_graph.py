"""The CUDA graph around the step: one launch in place of hundreds; :mod:`fusion_advisor.fuse.cuda_graph` records it."""

from __future__ import annotations

from fusion_advisor.fuse.rewrite.record import CallRewrite

CUDA_GRAPH = CallRewrite(
    id="cuda-graph", title="CUDA graph", after={"scan-kernels": "it records the step as all other rewrites leave it"}
)
