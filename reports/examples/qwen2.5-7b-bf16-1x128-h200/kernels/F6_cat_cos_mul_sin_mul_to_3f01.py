# cat_cos_mul_sin_mul_to_3f01: cat -> cos -> mul -> sin -> mul -> to -> to in one kernel
#
# Moves each operand once: x 4 B/element, out1 2 B/element, out2 2 B/element.
# Maths in float32, rounded once, at the store.
# Tuning: block_rows=4 num_warps=4
# Origin: generated from the chain.

import triton
import triton.language as tl


@triton.jit
def fa_cat_cos_mul_sin_mul_to_3f01_03b69a(
    x_ptr, out1_ptr, out2_ptr,
    rows, cols: tl.constexpr, x_stride1: tl.constexpr, out1_stride0: tl.constexpr, out1_offset: tl.constexpr,
    out2_stride0: tl.constexpr, out2_offset: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = tl.program_id(0)
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask

    x = tl.load(x_ptr + row + col * x_stride1, mask=mask, other=0.0)
    cos_x = tl.cos(x)
    sin_x = tl.sin(x)

    tl.store(out1_ptr + row * out1_stride0 + col, cos_x, mask=mask)
    tl.store(out1_ptr + row * out1_stride0 + col + out1_offset, cos_x, mask=mask)
    tl.store(out2_ptr + row * out2_stride0 + col, sin_x, mask=mask)
    tl.store(out2_ptr + row * out2_stride0 + col + out2_offset, sin_x, mask=mask)
