# rope_qk_cache: rotary position embedding of queries and keys; keys and values go straight into their rows of a
# static cache
#
# Moves each operand once: q 4 B/element, cos 4 B/column, sin 4 B/column, q_out 4 B/element, position 8 B in
# all, k 4 B/element, v 4 B/element, k_cache 4 B/element, v_cache 4 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel rope_qk_cache, variant rotate_half.
# Source: https://arxiv.org/abs/2104.09864

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def checked(place, extent, wanted):
    # Whether a position lies in its tensor. One that does not stops the kernel, as it stops torch's: where nothing is wanted,
    # past the end for instance, no position counts. The launch asks for assertions (debug=True).
    is_inside = (place >= 0) & (place < extent)
    tl.device_assert(is_inside | (wanted == 0), "position out of range")
    return is_inside & (wanted != 0)

# ---- kernel ----


@triton.jit
def part1(
    program,
    q_ptr, cos_ptr, sin_ptr, q_out_ptr,
    rows, cols: tl.constexpr, q_stride0: tl.constexpr, q_offset: tl.constexpr, cos_offset: tl.constexpr,
    sin_offset: tl.constexpr, q_out_stride0: tl.constexpr, q_out_offset: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = program
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask
    shared_col = col + 0 * row if BLOCK_COLS >= 128 and BLOCK_COLS < 512 else col  # laid out as rows are

    q = tl.load(q_ptr + row * q_stride0 + col, mask=mask, other=0.0)
    q_shifted = tl.load(q_ptr + row * q_stride0 + col + q_offset, mask=mask, other=0.0)
    cos = tl.load(cos_ptr + shared_col, mask=col_mask, other=0.0)
    cos_shifted = tl.load(cos_ptr + shared_col + cos_offset, mask=col_mask, other=0.0)
    sin = tl.load(sin_ptr + shared_col, mask=col_mask, other=0.0)
    sin_shifted = tl.load(sin_ptr + shared_col + sin_offset, mask=col_mask, other=0.0)
    q_out = q * cos + q_shifted * -1.0 * sin
    q_out_shifted = q_shifted * cos_shifted + q * sin_shifted

    tl.store(q_out_ptr + row * q_out_stride0 + col, q_out, mask=mask)
    tl.store(q_out_ptr + row * q_out_stride0 + col + q_out_offset, q_out_shifted, mask=mask)


@triton.jit
def part2(
    program,
    position_ptr, k_ptr, cos_ptr, sin_ptr, v_ptr, k_cache_ptr, v_cache_ptr,
    rows, cols: tl.constexpr, k_cache_extent: tl.constexpr, k_stride0: tl.constexpr, k_offset: tl.constexpr,
    cos_offset: tl.constexpr, sin_offset: tl.constexpr, v_stride0: tl.constexpr, v_offset: tl.constexpr,
    k_cache_stride0: tl.constexpr, k_cache_step0: tl.constexpr, k_cache_offset: tl.constexpr,
    v_cache_stride0: tl.constexpr, v_cache_step0: tl.constexpr, v_cache_offset: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = program
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask
    shared_col = col + 0 * row if BLOCK_COLS >= 128 and BLOCK_COLS < 512 else col  # laid out as rows are

    position = tl.load(position_ptr)
    k = tl.load(k_ptr + row * k_stride0 + col, mask=mask, other=0.0)
    k_shifted = tl.load(k_ptr + row * k_stride0 + col + k_offset, mask=mask, other=0.0)
    cos = tl.load(cos_ptr + shared_col, mask=col_mask, other=0.0)
    cos_shifted = tl.load(cos_ptr + shared_col + cos_offset, mask=col_mask, other=0.0)
    sin = tl.load(sin_ptr + shared_col, mask=col_mask, other=0.0)
    sin_shifted = tl.load(sin_ptr + shared_col + sin_offset, mask=col_mask, other=0.0)
    v = tl.load(v_ptr + row * v_stride0 + col, mask=mask, other=0.0)
    v_shifted = tl.load(v_ptr + row * v_stride0 + col + v_offset, mask=mask, other=0.0)
    fits_k_cache = checked(position, k_cache_extent, True)
    k_cache = k * cos + k_shifted * -1.0 * sin
    k_cache_shifted = k_shifted * cos_shifted + k * sin_shifted

    store_mask = tl.where(fits_k_cache, mask, False)
    tl.store(k_cache_ptr + position * k_cache_step0 + row * k_cache_stride0 + col, k_cache, mask=store_mask)
    tl.store(
        k_cache_ptr + position * k_cache_step0 + row * k_cache_stride0 + col + k_cache_offset, k_cache_shifted, mask=store_mask
    )
    tl.store(v_cache_ptr + position * v_cache_step0 + row * v_cache_stride0 + col, v, mask=store_mask)
    tl.store(v_cache_ptr + position * v_cache_step0 + row * v_cache_stride0 + col + v_cache_offset, v_shifted, mask=store_mask)


@triton.jit
def fa_rope_qk_cache_95c9d0(
    q_ptr, cos_ptr, sin_ptr, position_ptr, k_ptr, v_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr,
    start_of_2, rows_of_1, cols_of_1: tl.constexpr, q_stride0_of_1: tl.constexpr, q_offset_of_1: tl.constexpr,
    cos_offset_of_1: tl.constexpr, sin_offset_of_1: tl.constexpr, q_out_stride0_of_1: tl.constexpr,
    q_out_offset_of_1: tl.constexpr, rows_of_2, cols_of_2: tl.constexpr, k_cache_extent_of_2: tl.constexpr,
    k_stride0_of_2: tl.constexpr, k_offset_of_2: tl.constexpr, cos_offset_of_2: tl.constexpr,
    sin_offset_of_2: tl.constexpr, v_stride0_of_2: tl.constexpr, v_offset_of_2: tl.constexpr,
    k_cache_stride0_of_2: tl.constexpr, k_cache_step0_of_2: tl.constexpr, k_cache_offset_of_2: tl.constexpr,
    v_cache_stride0_of_2: tl.constexpr, v_cache_step0_of_2: tl.constexpr, v_cache_offset_of_2: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < start_of_2:
        part1(
            program,
            q_ptr, cos_ptr, sin_ptr, q_out_ptr,
            rows_of_1, cols_of_1, q_stride0_of_1, q_offset_of_1, cos_offset_of_1, sin_offset_of_1, q_out_stride0_of_1,
            q_out_offset_of_1,
            INDEX, BLOCK_ROWS, BLOCK_COLS,
        )
    else:
        part2(
            program - start_of_2,
            position_ptr, k_ptr, cos_ptr, sin_ptr, v_ptr, k_cache_ptr, v_cache_ptr,
            rows_of_2, cols_of_2, k_cache_extent_of_2, k_stride0_of_2, k_offset_of_2, cos_offset_of_2, sin_offset_of_2,
            v_stride0_of_2, v_offset_of_2, k_cache_stride0_of_2, k_cache_step0_of_2, k_cache_offset_of_2,
            v_cache_stride0_of_2, v_cache_step0_of_2, v_cache_offset_of_2,
            INDEX, BLOCK_ROWS, BLOCK_COLS,
        )
