"""Launch parameters of Triton kernels to try after the backend's own choice.

Figures: ``docs/measurements/compile_ahead.md``.
"""

from __future__ import annotations

from math import prod

from fusion_advisor.codegen.common.arguments import FEW_ROWS, Schedule
from fusion_advisor.codegen.common.column_passes import column_passes
from fusion_advisor.codegen.common.descriptor import Search
from fusion_advisor.codegen.common.horizontal_fusion import calls_of, largest
from fusion_advisor.codegen.common.online_softmax import online_sums
from fusion_advisor.codegen.split.choose import split_program
from fusion_advisor.codegen.triton.body import rows_stay_cached
from fusion_advisor.codegen.triton.tiling import choose_shape, walks_columns
from fusion_advisor.ir.program import TINY_ELEMENTS, Program, is_tiny
from fusion_advisor.records import Tuning

_MANY_LOADS = 8
"""Elements that a thread reads for each one it writes, from which on it has registers for no more than the own choice gives it.

All loads are under way at once: 11 for each of 32 elements of a thread are more than its 255 registers, and take long to compile.
"""


def search(program: Program) -> Search:
    """Return block sizes and warps worth trying for a Program."""
    parts = split_program(program)
    if parts is not None:  # each launch has its own
        return Search(shape_of=lambda _: "; ".join(repr(part.tuning) for part in parts.parts), tunings=[])
    plan = largest(calls_of(program, flatten_rows=False))
    is_looped = walks_columns(plan, Tuning())

    def shape_of(tuning: Tuning) -> str:
        return choose_shape(plan, tuning, is_looped=walks_columns(plan, tuning)).text

    def found(tunings: list[Tuning]) -> Search:
        return Search(shape_of=shape_of, tunings=tunings)

    own = choose_shape(plan, Tuning(), is_looped=is_looped)
    warps, rows, cols = own.num_warps, own.constants.get("BLOCK_ROWS", 1), own.constants["BLOCK_COLS"]
    if is_looped:
        # Of rows that the L1 cache is to hold from walk to walk only a few may be under way: those of 80 kB two at a time.
        # Of 12 tunings of walked rows on an H200 none chose fewer warps or columns. A group norm takes 1 s to compile for each.
        second = (4096, 32) if rows_stay_cached([plan]) else (8192, 16)
        return found([Tuning(block_cols=c, num_warps=w) for c, w in ((4096, 16), second)])
    if plan.kind == "flat":
        blocks = ((2048, 4), (1024, 2), (4096, 8), (512, 4), (512, 2))
        tiny = ((256, 4), (128, 1), (128, 4), (512, 4), (256, 1))
        return found([Tuning(block_cols=c, num_warps=w) for c, w in (tiny if is_tiny(program) else blocks)])
    if plan.kind == "tiled" and is_tiny(program):
        heights = ((256, 4), (128, 2), (128, 4), (64, 1), (512, 4))
        return found([Tuning(block_rows=max(1, n // cols), num_warps=w) for n, w in heights])
    if plan.kind == "tiled":
        return found(_tiles(plan, rows, cols, warps))
    around = [Tuning(num_warps=w) for w in (warps * 2, warps // 2, warps * 4) if 1 <= w <= 32]
    if prod(program.dims) <= TINY_ELEMENTS and cols <= 128:
        around[:0] = [Tuning(block_rows=4, num_warps=4), Tuning(block_rows=2, num_warps=1)]
    narrow = [Tuning(block_rows=r, num_warps=w) for r, w in ((rows * 2, warps), (rows * 4, warps * 2)) if cols * r <= 8192]
    # One plain reduction over a row of 16 kB or more: LayerNorm's and softmax's first walks compute too much to be worth another.
    sums = column_passes(plan)[1]
    is_plain = len(sums) == 2 and len(sums[0].reductions) == 1 and not online_sums(plan.program)
    is_wide = is_plain and program.dims[-1] > 4096 and plan.row_count >= FEW_ROWS
    walked = [Tuning(block_cols=4096, num_warps=16)] if is_wide else []
    return found([*walked, *narrow[:1], *around, *narrow[1:]])


def _tiles(plan: Schedule, rows: int, cols: int, warps: int) -> list[Tuning]:
    """Tiles of other heights than the backend's own choice."""
    heights = [(rows * 2, warps), (rows * 2, warps * 2), (rows * 4, 8)]
    if len(plan.loads) >= _MANY_LOADS:
        heights = [(height, own) for height, own in heights if height * warps <= rows * own]
    taller = [Tuning(block_rows=height, num_warps=own) for height, own in heights if height <= 1024]
    # The best tile of rope on an H200: 8 rows of 64 took 34.5 and 10.14 µs on two shapes, the own choice 34.8 and 10.45 µs.
    small = Tuning(block_rows=max(1, 512 // (cols * (2 if plan.has_pairs else 1))), num_warps=4)
    return [small, *taller, Tuning(block_rows=max(1, rows // 2), num_warps=warps)]
