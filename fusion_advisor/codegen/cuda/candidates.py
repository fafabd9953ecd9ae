"""Launch parameters of CUDA kernels to try after the backend's own choice, and which programs to try in CUDA."""

from __future__ import annotations

from fusion_advisor.codegen.common.arguments import FEW_ROWS, next_power
from fusion_advisor.codegen.common.column_passes import parts_of
from fusion_advisor.codegen.common.descriptor import Search
from fusion_advisor.codegen.common.horizontal_fusion import calls_of, largest
from fusion_advisor.codegen.cuda.ops import vector_width
from fusion_advisor.codegen.cuda.shared_memory import SharedMemory
from fusion_advisor.codegen.cuda.tiling import fits_cluster, form_for, launch_shape, pack_width
from fusion_advisor.ir.program import Program, is_tiny
from fusion_advisor.records import Tuning

_CLUSTERS = (Tuning(cluster=4, packs=6), Tuning(cluster=8, packs=6), Tuning(cluster=4, packs=8), Tuning(cluster=8))
"""On an H200 the fastest of sixteen: group norm of 1,024 groups of 40,960 elements 43.2 µs (8 blocks of 4 packs 48.5), 64 groups
6.3 µs (7.2), log-softmax of 2,048 x 50,257 119.9 µs (124.2), of 128,256 251.6 µs. Two blocks never were, nor were blocks that
stay and fetch the next row meanwhile (cp.async.bulk: 57.6, 128.2 and 337 µs), nor plain stores between cluster barriers."""
_CLUSTERS_OF_FEW_ROWS = (Tuning(cluster=8), Tuning(cluster=8, packs=1), Tuning(cluster=4), Tuning(cluster=4, packs=8))
"""Where there are fewer rows than a GPU runs blocks at once, as many threads as a row can use."""


def search(program: Program, shared: SharedMemory) -> Search:
    """Return launch shapes worth trying for a Program on a GPU with this shared memory."""
    calls = calls_of(program, flatten_rows=True)
    plans = [call.plan for call in calls]
    plan, form = largest(calls), form_for(plans)

    def shape_of(tuning: Tuning) -> str:
        macros, _ = launch_shape(plan, tuning, form=form_for(plans, tuning), shared=shared)
        return " ".join(f"{name}={value}" for name, value in macros.items())

    def found(tunings: list[Tuning]) -> Search:
        return Search(shape_of=shape_of, tunings=tunings)

    if plan.kind != "rows" and is_tiny(program):
        narrow = ((2, 4), (4, 2), (8, 1), (2, 8), (1, 4))
        return found([Tuning(packs=1, block_cols=c, num_warps=w) for c, w in narrow])
    if plan.kind == "flat":
        return found([Tuning(packs=n, num_warps=w) for n, w in ((1, 4), (4, 4), (2, 2), (1, 8), (8, 4))])
    if plan.kind == "tiled":
        return found([Tuning(packs=n, num_warps=w) for n, w in ((1, 4), (2, 2), (2, 8), (4, 4), (2, 4))])
    if form.is_looped:
        around = [Tuning(num_warps=16, block_rows=2), *(Tuning(packs=n, num_warps=w) for n, w in ((4, 16), (4, 32), (2, 32)))]
        clusters = _CLUSTERS_OF_FEW_ROWS if plan.row_count < FEW_ROWS else _CLUSTERS
        shared_rows = [tuning for tuning in clusters if shared.is_distributed and fits_cluster(plan, tuning)]
        # The search may run out of time: what gains most comes first.
        return found([*shared_rows, *around, Tuning(packs=2, num_warps=16)])
    packs = -(-program.dims[-1] // pack_width(plan, form)[0])
    if packs <= 16:  # rows that share a warp
        heights = {lanes: max(1, lanes // next_power(packs)) for lanes in (32, 64, 256)}
        few = [Tuning(packs=2), Tuning(packs=2, block_rows=2 * heights[64])] if packs > 1 else []
        return found([*(Tuning(block_rows=rows) for rows in heights.values()), *few])
    # Packs, not threads: fewer threads wait for each other, more loads are under way, at any width.
    several = [Tuning(num_warps=1, block_rows=r) for r in (2, 8)] if -(-program.dims[-1] // vector_width(plan)) <= 256 else []
    return found([*(Tuning(packs=n) for n in (2, 8)), *several, Tuning(packs=1), Tuning(packs=3)])


def is_faster_in_cuda(program: Program) -> bool:
    """Whether a Program is of a kind that CUDA C++ was faster at than Triton, so that it is worth building in both.

    These are rows too wide for Triton's registers and walked more than once, which the blocks of a cluster share in CUDA, and
    rows that channels divide, for whose number CUDA's kernels are compiled. On an H200 group norm takes Triton 1.3 to 1.6 times
    as long from 2 to 168 MB, one row of 25,088 elements 4.0 times, log-softmax of 2,048 x 128,256 1.6 times. A tanh
    that is no part of a GELU, which is lowered to a sigmoid, takes 1.07 to 1.10 times as long from 8 MB on.
    """
    from fusion_advisor.codegen.triton.body import walks
    from fusion_advisor.codegen.triton.tiling import walks_columns

    plans = [call.plan for call in calls_of(program, flatten_rows=False)]
    rereads = any(walks_columns(plan, Tuning()) and len(walks(plan)[1]) > 1 for plan in plans)
    has_tanh = any(value.op == "tanh" for plan in plans for value in plan.program.values)
    return rereads or has_tanh or any(plan.kind == "rows" and parts_of(plan) for plan in plans)
