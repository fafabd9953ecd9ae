# rope: rotary position embedding: x * cos + rotate_half(x) * sin, x read where it lies in the projection
#
# Moves each operand once: x 2 B/element; cos 2 B/element, the same for every row; sin 2 B/element, the same for
# every row; out 2 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel rope, variant rotate_half.
# Source: https://arxiv.org/abs/2104.09864

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def to_float32(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

# ---- kernel ----


@triton.jit
def fa_rope_b0f7e1(
    x_ptr, cos_ptr, sin_ptr, out_ptr,
    rows: tl.constexpr, cols: tl.constexpr, x_stride0: tl.constexpr, x_stride1: tl.constexpr,
    x_offset: tl.constexpr, cos_stride0: tl.constexpr, cos_offset: tl.constexpr, sin_stride0: tl.constexpr,
    sin_offset: tl.constexpr, out_stride0: tl.constexpr, out_stride1: tl.constexpr, out_offset: tl.constexpr,
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
    shared_col = col + 0 * row if BLOCK_COLS >= 128 and BLOCK_COLS < 1024 else col  # laid out as rows are
    x_row = x_ptr + i0 * x_stride0 + row * x_stride1
    out_row = out_ptr + i0 * out_stride0 + row * out_stride1

    x = to_float32(tl.load(x_row + col, mask=mask, other=0.0))
    x_shifted = to_float32(tl.load(x_row + col + x_offset, mask=mask, other=0.0))
    cos = to_float32(tl.load(cos_ptr + i0 * cos_stride0 + shared_col, mask=col_mask, other=0.0))
    cos_shifted = to_float32(tl.load(cos_ptr + i0 * cos_stride0 + shared_col + cos_offset, mask=col_mask, other=0.0))
    sin = to_float32(tl.load(sin_ptr + i0 * sin_stride0 + shared_col, mask=col_mask, other=0.0))
    sin_shifted = to_float32(tl.load(sin_ptr + i0 * sin_stride0 + shared_col + sin_offset, mask=col_mask, other=0.0))
    out = x * cos + x_shifted * -1.0 * sin
    out_shifted = x_shifted * cos_shifted + x * sin_shifted

    tl.store(out_row + col, out, mask=mask)
    tl.store(out_row + col + out_offset, out_shifted, mask=mask)
