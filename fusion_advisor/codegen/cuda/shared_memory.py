"""What rows that are wider than registers hold keep in shared memory between the walks over their columns.

The first walk that reads a pack leaves it where the same thread finds it again: a thread takes only what it wrote itself, so
nothing is waited for. Columns past what fits are read from memory once more. Of rows of 128,256 columns in bfloat16 an H200 holds
nine tenths; without that, the rows of all blocks under way are more than its L2 cache, and each walk waits for memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion_advisor.codegen.common.arguments import Schedule
from fusion_advisor.codegen.common.column_passes import Pass, column_passes
from fusion_advisor.codegen.common.online_softmax import online_sums
from fusion_advisor.codegen.common.welford import moments
from fusion_advisor.codegen.cuda.ops import CudaWriter
from fusion_advisor.ir.program import REDUCTIONS

_KIB = 1024
_ALIGNED_COLS = 16
"""Arrays hold a multiple of this, so that the next one starts where a pack may."""
_OF_ARCH = {75: 64, 80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 103: 228, 110: 228, 120: 100, 121: 100}
"""KiB of an SM by compute capability: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """The shared memory of a GPU; none by default."""

    block_bytes: int = 0
    """The most that one block may ask for."""
    sm_bytes: int = 0
    """What all blocks on a multiprocessor have together."""
    reserved_bytes: int = _KIB
    """What the system takes for each block."""
    is_distributed: bool = False
    """Whether blocks of a cluster write to one another's: from compute capability 9.0 on."""


def shared_memory_of(arch: int) -> SharedMemory:
    """The shared memory of a GPU that need not be here.

    Args:
        arch: compute capability, such as 80 or 90; an unknown one has what every GPU has, 48 KiB.
    """
    sm_bytes = _OF_ARCH.get(arch, 49) * _KIB
    return SharedMemory(block_bytes=sm_bytes - (0 if arch == 75 else _KIB), sm_bytes=sm_bytes, is_distributed=arch >= 90)


def looped_passes(plan: Schedule) -> tuple[tuple[int, ...], tuple[Pass, ...]]:
    """The walks over columns that do not stay in registers: as few as possible, see ``online_softmax.py`` and ``welford.py``."""
    return column_passes(plan, online_sums(plan.program), moments(plan.program))


def packs_of(plan: Schedule, writer: CudaWriter, step: Pass) -> list[int]:
    """The packs that a walk needs: loads, of a pair the first one, and what dropout keeps."""
    return [n for n in dict.fromkeys(min(plan.load_pair(n)) for n in step.values) if n in writer.packs]


def staged_packs(plan: Schedule, writer: CudaWriter, passes: Sequence[Pass]) -> tuple[int, ...]:
    """The packs that more than one walk needs, in the order of their arrays: dropout's bytes come last."""
    reads = [packs_of(plan, writer, step) for step in passes]
    again = {n for number, read in enumerate(reads) for n in read for later in reads[number + 1 :] if n in later}
    return tuple(sorted(again, key=lambda n: (n in plan.numbers, n)))


def pack_bytes(plan: Schedule, width: int) -> int:
    """Bytes of shared memory that each pack of columns takes: its elements, and a byte for what dropout keeps of them."""
    staged = staged_packs(plan, CudaWriter(plan, fast_math=False), looped_passes(plan)[1])
    return sum(1 if n in plan.numbers else plan.loads[n].col_bytes * width for n in staged)


def staged_cols(plan: Schedule, shared: SharedMemory, *, width: int, threads: int, blocks: int, before: int = 0) -> int:
    """Columns that a block holds when as many rows are under way on a multiprocessor.

    Args:
        plan: the schedule of a kernel that walks rows in parts.
        shared: of the GPU.
        width: columns of a pack.
        threads: of a block.
        blocks: of a multiprocessor.
        before: columns that the first pack may start before the row.
    """
    each, cols = pack_bytes(plan, width), plan.program.dims[-1] + before
    # Reductions have memory of their own: a number for each warp, of 8 bytes at most.
    partials = 8 * (threads // 32) * sum(value.op in REDUCTIONS for value in plan.program.values)
    free = min(shared.block_bytes, shared.sm_bytes // blocks - shared.reserved_bytes) - partials
    if each == 0 or free <= 0:
        return 0
    whole = -(-cols // _ALIGNED_COLS) * _ALIGNED_COLS
    return min(whole, free // each * width // _ALIGNED_COLS * _ALIGNED_COLS)
