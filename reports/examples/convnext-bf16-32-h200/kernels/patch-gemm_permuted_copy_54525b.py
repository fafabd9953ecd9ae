# permuted_copy: permuted dims, contiguous
#
# Moves each operand once: permuted 2 B/element, plain 2 B/element.
# Maths in float32, rounded once, at the store.
# Tuning: block_rows=128 num_warps=8
# Origin: generated for what a GEMM over patches reads and gives.

import triton
import triton.language as tl


@triton.jit
def wide(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def fa_permuted_copy_54525b(
    permuted_ptr, plain_ptr,
    rows: tl.constexpr, cols: tl.constexpr, permuted_stride0: tl.constexpr, permuted_stride2: tl.constexpr,
    plain_stride0: tl.constexpr, plain_stride1: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = tl.program_id(0)
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles % row_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    i0 = (tile // col_tiles // row_tiles).to(INDEX)
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask
    permuted_row = permuted_ptr + i0 * permuted_stride0 + row
    plain_row = plain_ptr + i0 * plain_stride0 + row * plain_stride1

    permuted = wide(tl.load(permuted_row + col * permuted_stride2, mask=mask, other=0.0))

    tl.store(plain_row + col, permuted, mask=mask)
