# rope_interleaved: rotary position embedding over neighbouring pairs: x * cos + rotate_pairs(x) * sin, x read
# where it lies in the projection
#
# Moves each operand once: x 4 B/element, cos 4 B/element, sin 4 B/element, out 4 B/element.
# Maths in float32, rounded once, at the store.
# Origin: library kernel rope_interleaved, variant stack.
# Source: https://arxiv.org/abs/2104.09864

import triton
import triton.language as tl


@triton.jit
def fa_rope_interleaved_66a12d(
    x_ptr, cos_ptr, sin_ptr, out_ptr,
    rows, cols, x_stride0, x_stride1, x_stride2, x_offset, cos_stride0, cos_stride2, cos_offset, sin_stride0,
    sin_stride2, sin_offset, out_stride0, out_stride1, out_stride2, out_offset,
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

    x = tl.load(x_row + col * x_stride2, mask=mask, other=0.0)
    x_shifted = tl.load(x_row + col * x_stride2 + x_offset, mask=mask, other=0.0)
    cos = tl.load(cos_ptr + i0 * cos_stride0 + col * cos_stride2, mask=col_mask, other=0.0)
    cos_shifted = tl.load(cos_ptr + i0 * cos_stride0 + col * cos_stride2 + cos_offset, mask=col_mask, other=0.0)
    sin = tl.load(sin_ptr + i0 * sin_stride0 + col * sin_stride2, mask=col_mask, other=0.0)
    sin_shifted = tl.load(sin_ptr + i0 * sin_stride0 + col * sin_stride2 + sin_offset, mask=col_mask, other=0.0)
    out = x * cos + -x_shifted * sin
    out_2 = x_shifted * cos_shifted + x * sin_shifted

    tl.store(out_row + col * out_stride2, out, mask=mask)
    tl.store(out_row + col * out_stride2 + out_offset, out_2, mask=mask)
