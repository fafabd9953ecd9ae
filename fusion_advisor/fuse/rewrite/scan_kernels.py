"""The rewrite that puts kernels in place of unrolled recurrences; :mod:`fusion_advisor.fuse.stages.try_scans` tries it."""

from __future__ import annotations

from fusion_advisor.fuse.rewrite.record import ScanRewrite

TITLE = "recurrence"
"""Of every such kernel; reports and saved plans know them by it."""

SCAN_KERNELS = ScanRewrite(
    id="scan-kernels",
    title="recurrence kernels",
    after={"linear-kernels": "what a linear's kernel took in is no longer there for the steps' kernel to compute"},
)
