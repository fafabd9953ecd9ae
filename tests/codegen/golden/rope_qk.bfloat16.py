# rope_qk: rotary position embedding of queries and keys in one launch, read where they lie in their projections
#
# Moves each operand once: q 2 B/element; cos 2 B/element, the same for every row; sin 2 B/element, the same for
# every row; q_out 2 B/element; k 2 B/element; k_out 2 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel rope_qk, variant rotate_half.
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
def part1(
    program,
    q_ptr, cos_ptr, sin_ptr, q_out_ptr,
    rows: tl.constexpr, cols: tl.constexpr, q_stride0: tl.constexpr, q_stride1: tl.constexpr,
    q_offset: tl.constexpr, cos_stride0: tl.constexpr, cos_offset: tl.constexpr, sin_stride0: tl.constexpr,
    sin_offset: tl.constexpr, q_out_stride0: tl.constexpr, q_out_stride1: tl.constexpr, q_out_offset: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = program
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles % row_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    i0 = (tile // col_tiles // row_tiles).to(INDEX)
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask
    shared_col = col + 0 * row if BLOCK_COLS >= 128 and BLOCK_COLS < 1024 else col  # laid out as rows are
    q_row = q_ptr + i0 * q_stride0 + row * q_stride1
    q_out_row = q_out_ptr + i0 * q_out_stride0 + row * q_out_stride1

    q = to_float32(tl.load(q_row + col, mask=mask, other=0.0))
    q_shifted = to_float32(tl.load(q_row + col + q_offset, mask=mask, other=0.0))
    cos = to_float32(tl.load(cos_ptr + i0 * cos_stride0 + shared_col, mask=col_mask, other=0.0))
    cos_shifted = to_float32(tl.load(cos_ptr + i0 * cos_stride0 + shared_col + cos_offset, mask=col_mask, other=0.0))
    sin = to_float32(tl.load(sin_ptr + i0 * sin_stride0 + shared_col, mask=col_mask, other=0.0))
    sin_shifted = to_float32(tl.load(sin_ptr + i0 * sin_stride0 + shared_col + sin_offset, mask=col_mask, other=0.0))
    q_out = q * cos + q_shifted * -1.0 * sin
    q_out_shifted = q_shifted * cos_shifted + q * sin_shifted

    tl.store(q_out_row + col, q_out, mask=mask)
    tl.store(q_out_row + col + q_out_offset, q_out_shifted, mask=mask)


@triton.jit
def fa_rope_qk_4e758a(
    q_ptr, cos_ptr, sin_ptr, k_ptr, q_out_ptr, k_out_ptr,
    start_of_2, rows_of_1: tl.constexpr, cols_of_1: tl.constexpr, q_stride0_of_1: tl.constexpr,
    q_stride1_of_1: tl.constexpr, q_offset_of_1: tl.constexpr, cos_stride0_of_1: tl.constexpr,
    cos_offset_of_1: tl.constexpr, sin_stride0_of_1: tl.constexpr, sin_offset_of_1: tl.constexpr,
    q_out_stride0_of_1: tl.constexpr, q_out_stride1_of_1: tl.constexpr, q_out_offset_of_1: tl.constexpr,
    rows_of_2: tl.constexpr, cols_of_2: tl.constexpr, k_stride0_of_2: tl.constexpr, k_stride1_of_2: tl.constexpr,
    k_offset_of_2: tl.constexpr, cos_stride0_of_2: tl.constexpr, cos_offset_of_2: tl.constexpr,
    sin_stride0_of_2: tl.constexpr, sin_offset_of_2: tl.constexpr, k_out_stride0_of_2: tl.constexpr,
    k_out_stride1_of_2: tl.constexpr, k_out_offset_of_2: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < start_of_2:
        part1(
            program,
            q_ptr, cos_ptr, sin_ptr, q_out_ptr,
            rows_of_1, cols_of_1, q_stride0_of_1, q_stride1_of_1, q_offset_of_1, cos_stride0_of_1, cos_offset_of_1,
            sin_stride0_of_1, sin_offset_of_1, q_out_stride0_of_1, q_out_stride1_of_1, q_out_offset_of_1,
            INDEX, BLOCK_ROWS, BLOCK_COLS,
        )
    else:
        part1(
            program - start_of_2,
            k_ptr, cos_ptr, sin_ptr, k_out_ptr,
            rows_of_2, cols_of_2, k_stride0_of_2, k_stride1_of_2, k_offset_of_2, cos_stride0_of_2, cos_offset_of_2,
            sin_stride0_of_2, sin_offset_of_2, k_out_stride0_of_2, k_out_stride1_of_2, k_out_offset_of_2,
            INDEX, BLOCK_ROWS, BLOCK_COLS,
        )
