# permuted_copy: permuted dims, contiguous
#
# Moves each operand once: permuted 2 B/element, plain 2 B/element.
# Maths in float32, rounded once, at the store.
# Tuning: block_rows=64 num_warps=8
# Origin: generated for what a GEMM over patches reads and gives.

import triton
import triton.language as tl


@triton.jit
def wide(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def fa_permuted_copy_523ec9(
    permuted_ptr, plain_ptr,
    rows, cols: tl.constexpr, permuted_stride1: tl.constexpr, plain_stride0: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = tl.program_id(0)
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask

    permuted = wide(tl.load(permuted_ptr + row + col * permuted_stride1, mask=mask, other=0.0))

    tl.store(plain_ptr + row * plain_stride0 + col, permuted, mask=mask)
