# rope: mul -> neg -> cat -> mul -> add in one kernel
#
# Moves each operand once: x 2 B/element, cos 2 B/element, sin 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# Origin: library kernel rope, variant rotate_half.
# Source: https://arxiv.org/abs/2104.09864

import triton
import triton.language as tl


@triton.jit
def fa_rope_ac558e(
    x_ptr, cos_ptr, sin_ptr, out_ptr,
    rows, cols, x_stride0, x_stride1, cos_stride0, x_offset, x_offset_2, sin_stride0, out_stride0, out_stride1,
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
    x_row = x_ptr + i0 * x_stride0 + row * x_stride1
    out_row = out_ptr + i0 * out_stride0 + row * out_stride1

    x = tl.load(x_row + col, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + i0 * cos_stride0 + col, mask=col_mask, other=0.0).to(tl.float32)
    is_ge = col >= 64
    x_shifted = tl.load(x_row + col + x_offset, mask=mask & is_ge, other=0.0).to(tl.float32)
    is_lt = col < 64
    x_shifted_2 = tl.load(x_row + col + x_offset_2, mask=mask & is_lt, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + i0 * sin_stride0 + col, mask=col_mask, other=0.0).to(tl.float32)
    product = tl.where(is_lt, -x_shifted_2, x_shifted) * sin
    out = x * cos + product

    tl.store(out_row + col, out, mask=mask)
