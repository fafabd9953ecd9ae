"""All rewrites, in the order in which they are tried and stacked. To add a rewrite, add its file and its line here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.fx import Graph

from fusion_advisor.fuse.dependence.masks_of_ones import SKIP_MASKS
from fusion_advisor.fuse.loss.budget import MEMORY_BUDGET
from fusion_advisor.fuse.loss.recompute_options import RECOMPUTE_OPTIONS
from fusion_advisor.fuse.loss.record import LINEAR_CROSS_ENTROPY
from fusion_advisor.fuse.padding.pad_trial import PAD_PRODUCTS
from fusion_advisor.fuse.passes.attention import DROP_MASKS, GROUP_HEADS, SHARE_MASKS
from fusion_advisor.fuse.passes.constant_folding import FOLD_CONSTANTS, FOLD_FROZEN
from fusion_advisor.fuse.passes.cse import SHARE_VALUES
from fusion_advisor.fuse.passes.cuda_graph import CUDA_GRAPH
from fusion_advisor.fuse.passes.flash_attention import FLASH
from fusion_advisor.fuse.passes.foreach_counters import BATCH_COUNTERS
from fusion_advisor.fuse.passes.gemm_epilogue import GEMM_EPILOGUE
from fusion_advisor.fuse.passes.in_trace import CHANNELS_LAST, CONTIGUOUS_MASKS, CONTIGUOUS_ROWS, SPLIT_BIASES
from fusion_advisor.fuse.passes.linear_sites import LINEAR_KERNELS
from fusion_advisor.fuse.passes.merge_gemms import MERGE_GEMMS
from fusion_advisor.fuse.passes.pad_gemm import ODD_WIDTH_GEMM, PAD_GEMM
from fusion_advisor.fuse.passes.patch_conv_to_gemm import PATCH_GEMM
from fusion_advisor.fuse.passes.slice_pushdown import NARROW_ROWS
from fusion_advisor.fuse.passes.window_conv_to_gemm import WINDOW_GEMM
from fusion_advisor.fuse.rewrite.collective_kernels import ALL_REDUCE_NORM
from fusion_advisor.fuse.rewrite.record import LayoutRewrite, PassRewrite, Rewrite
from fusion_advisor.fuse.rewrite.scan_kernels import SCAN_KERNELS
from fusion_advisor.records import GraphRewrite, RewriteStage, Status
from fusion_advisor.runtime.torch_internals.symbolic_sizes import Symbols

REWRITES: tuple[Rewrite, ...] = (
    LINEAR_CROSS_ENTROPY,
    PAD_PRODUCTS,
    MEMORY_BUDGET,
    *(option.rewrite for option in RECOMPUTE_OPTIONS),
    DROP_MASKS,
    GROUP_HEADS,
    SHARE_MASKS,
    SKIP_MASKS,
    FLASH,
    SHARE_VALUES,
    BATCH_COUNTERS,
    CONTIGUOUS_ROWS,
    CHANNELS_LAST,
    CONTIGUOUS_MASKS,
    SPLIT_BIASES,
    PAD_GEMM,
    ODD_WIDTH_GEMM,
    PATCH_GEMM,
    WINDOW_GEMM,
    FOLD_CONSTANTS,
    FOLD_FROZEN,
    NARROW_ROWS,
    MERGE_GEMMS,
    GEMM_EPILOGUE,
    ALL_REDUCE_NORM,
    LINEAR_KERNELS,
    SCAN_KERNELS,
    CUDA_GRAPH,
)
"""An earlier rewrite may be a condition of a later one: the records' ``after`` say which and why, and a test checks the order."""

PASSES: Mapping[str, PassRewrite] = {rewrite.id: rewrite for rewrite in REWRITES if isinstance(rewrite, PassRewrite)}
"""Graph passes that keep every layout, by id."""
LAYOUT_CHANGES: Mapping[str, LayoutRewrite] = {one.id: one for one in REWRITES if isinstance(one, LayoutRewrite)}
"""Rewrites after which the kept kernels are bound on changed graphs, by id."""


def order_faults(rewrites: Sequence[Rewrite]) -> list[str]:
    """Return what is wrong with the order of rewrites, one sentence for each fault.

    Args:
        rewrites: in the order in which they are stacked.
    """
    stages = list(RewriteStage)
    faults, earlier = [], set[str]()
    for before, rewrite in zip((None, *rewrites), rewrites, strict=False):
        if rewrite.id in earlier:
            faults.append(f"{rewrite.id} stands twice")
        if before is not None and stages.index(rewrite.stage) < stages.index(before.stage):
            faults.append(f"{rewrite.id} ({rewrite.stage}) stands after {before.id} ({before.stage})")
        faults += [f"{rewrite.id} must come after {other}: {why}" for other, why in rewrite.after.items() if other not in earlier]
        earlier.add(rewrite.id)
    return faults


def size_bound(graph: Graph, ends: Sequence[Symbols]) -> frozenset[str]:
    """Return the ids of the graph passes that serve no range: what they go by is not the same at all its ends.

    Args:
        graph: with open sizes.
        ends: the size of each, at every end of the range.
    """
    readers = {name: one.reads_off for name, one in PASSES.items() if one.reads_off is not None}
    return frozenset(name for name, read in readers.items() if len({read(graph, symbols) for symbols in ends}) > 1)


def kept_ids(rows: Iterable[GraphRewrite]) -> tuple[str, ...]:
    """Return the ids of the rewrites that were kept."""
    return tuple(row.id for row in rows if row.status is Status.KEPT)


def kept_passes(rows: Iterable[GraphRewrite]) -> list[str]:
    """Return the ids of the graph passes that were kept."""
    return [name for name in kept_ids(rows) if name in PASSES]


def row_of(rewrite: Rewrite, *, status: Status, reason: str, sites: int) -> GraphRewrite:
    """Return a rewrite's row of the report, before anything was timed."""
    return GraphRewrite(id=rewrite.id, name=rewrite.title, stage=rewrite.stage, status=status, reason=reason, sites=sites)
