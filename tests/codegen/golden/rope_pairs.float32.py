# rope_pairs: rotary position embedding over neighbouring pairs, each turned by one angle: (x0 cos - x1 sin, x0
# sin + x1 cos)
#
# Moves each operand once: x 4 B/element; cos 4 B/element, the same for every i0; sin 4 B/element, the same for
# every i0; out 4 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel rope_pairs, variant stack.
# Source: https://arxiv.org/abs/2104.09864

import triton
import triton.language as tl


@triton.jit
def fa_rope_pairs_3a7481(
    x_ptr, cos_ptr, sin_ptr, out_ptr,
    rows: tl.constexpr, cols: tl.constexpr, x_stride0: tl.constexpr, x_stride1: tl.constexpr,
    cos_stride1: tl.constexpr, sin_stride1: tl.constexpr, out_stride0: tl.constexpr, out_stride1: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = tl.program_id(0)
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    item = (tile % col_tiles).to(INDEX) * (2 * BLOCK_COLS) + tl.arange(0, 2 * BLOCK_COLS)[None, :]
    row = (tile // col_tiles % row_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    i0 = (tile // col_tiles // row_tiles).to(INDEX)
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask
    item_col_mask = item < 2 * tl.cast(cols, INDEX)
    item_mask = row_mask & item_col_mask
    x_row = x_ptr + i0 * x_stride0 + row * x_stride1
    out_row = out_ptr + i0 * out_stride0 + row * out_stride1

    x_run = tl.load(x_row + item, mask=item_mask, other=0.0)
    x_even, x_odd = tl.split(x_run.reshape(BLOCK_ROWS, BLOCK_COLS, 2))
    cos = tl.load(cos_ptr + row * cos_stride1 + col, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + row * sin_stride1 + col, mask=mask, other=0.0)
    out_odd = x_odd * cos + x_even * sin
    out_even = cos * x_even - x_odd * sin

    tl.store(out_row + item, tl.join(out_even, out_odd).reshape(BLOCK_ROWS, 2 * BLOCK_COLS), mask=item_mask)
