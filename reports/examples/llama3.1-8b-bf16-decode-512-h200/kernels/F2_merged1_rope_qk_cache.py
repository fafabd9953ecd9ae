# rope_qk_cache: mul -> neg -> cat -> mul -> add -> mul -> neg -> cat -> mul -> add -> index_copy -> index_copy
# in one kernel
#
# Moves each operand once: x 2 B/element, x2 2 B/column, x3 2 B/column, out1 2 B/element, x4 8 B in all, out2
# 2 B/element, out3 2 B/element.
# Maths in float32, rounded once, at the store.
# Tuning: block_rows=4 num_warps=4
# Origin: library kernel rope_qk_cache, variant rotate_half.
# Source: https://arxiv.org/abs/2104.09864

import triton
import triton.language as tl


@triton.jit
def wide(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def part1(
    program,
    x_ptr, x2_ptr, x3_ptr, out1_ptr,
    rows, cols: tl.constexpr, x_stride0: tl.constexpr, x_offset: tl.constexpr, x2_offset: tl.constexpr,
    x3_offset: tl.constexpr, out1_stride0: tl.constexpr, out1_offset: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = program
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask

    x = wide(tl.load(x_ptr + row * x_stride0 + col, mask=mask, other=0.0))
    x_shifted = wide(tl.load(x_ptr + row * x_stride0 + col + x_offset, mask=mask, other=0.0))
    x2 = wide(tl.load(x2_ptr + col, mask=col_mask, other=0.0))
    x2_shifted = wide(tl.load(x2_ptr + col + x2_offset, mask=col_mask, other=0.0))
    x3 = wide(tl.load(x3_ptr + col, mask=col_mask, other=0.0))
    x3_shifted = wide(tl.load(x3_ptr + col + x3_offset, mask=col_mask, other=0.0))
    out1 = x * x2 + -x_shifted * x3
    out1_2 = x_shifted * x2_shifted + x * x3_shifted

    tl.store(out1_ptr + row * out1_stride0 + col, out1, mask=mask)
    tl.store(out1_ptr + row * out1_stride0 + col + out1_offset, out1_2, mask=mask)


@triton.jit
def part2(
    program,
    x4_ptr, x_ptr, x2_ptr, x3_ptr, out2_ptr, out3_ptr,
    rows, cols: tl.constexpr, out2_extent: tl.constexpr, x_stride0: tl.constexpr, x_offset: tl.constexpr,
    x_offset_2: tl.constexpr, x2_offset: tl.constexpr, x3_offset: tl.constexpr, x_offset_3: tl.constexpr,
    x_offset_4: tl.constexpr, out2_stride0: tl.constexpr, out2_step0: tl.constexpr, out2_offset: tl.constexpr,
    out3_stride0: tl.constexpr, out3_step0: tl.constexpr, out3_offset: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = program
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask

    x4 = tl.load(x4_ptr)
    x_shifted = wide(tl.load(x_ptr + row * x_stride0 + col + x_offset, mask=mask, other=0.0))
    x_shifted_2 = wide(tl.load(x_ptr + row * x_stride0 + col + x_offset_2, mask=mask, other=0.0))
    x2 = wide(tl.load(x2_ptr + col, mask=col_mask, other=0.0))
    x2_shifted = wide(tl.load(x2_ptr + col + x2_offset, mask=col_mask, other=0.0))
    x3 = wide(tl.load(x3_ptr + col, mask=col_mask, other=0.0))
    x3_shifted = wide(tl.load(x3_ptr + col + x3_offset, mask=col_mask, other=0.0))
    x_shifted_3 = wide(tl.load(x_ptr + row * x_stride0 + col + x_offset_3, mask=mask, other=0.0))
    x_shifted_4 = wide(tl.load(x_ptr + row * x_stride0 + col + x_offset_4, mask=mask, other=0.0))
    fits_out2 = (x4 >= 0) & (x4 < out2_extent)
    out2 = x_shifted * x2 + -x_shifted_2 * x3
    out2_2 = x_shifted_2 * x2_shifted + x_shifted * x3_shifted

    store_mask = tl.where(fits_out2, mask, False)
    tl.store(out2_ptr + x4 * out2_step0 + row * out2_stride0 + col, out2, mask=store_mask)
    tl.store(out2_ptr + x4 * out2_step0 + row * out2_stride0 + col + out2_offset, out2_2, mask=store_mask)
    tl.store(out3_ptr + x4 * out3_step0 + row * out3_stride0 + col, x_shifted_3, mask=store_mask)
    tl.store(out3_ptr + x4 * out3_step0 + row * out3_stride0 + col + out3_offset, x_shifted_4, mask=store_mask)


@triton.jit
def fa_rope_qk_cache_5273ac(
    x_ptr, x2_ptr, x3_ptr, x4_ptr, out1_ptr, out2_ptr, out3_ptr,
    start_of_2, rows_of_1, cols_of_1: tl.constexpr, x_stride0_of_1: tl.constexpr, x_offset_of_1: tl.constexpr,
    x2_offset_of_1: tl.constexpr, x3_offset_of_1: tl.constexpr, out1_stride0_of_1: tl.constexpr,
    out1_offset_of_1: tl.constexpr, rows_of_2, cols_of_2: tl.constexpr, out2_extent_of_2: tl.constexpr,
    x_stride0_of_2: tl.constexpr, x_offset_of_2: tl.constexpr, x_offset_2_of_2: tl.constexpr,
    x2_offset_of_2: tl.constexpr, x3_offset_of_2: tl.constexpr, x_offset_3_of_2: tl.constexpr,
    x_offset_4_of_2: tl.constexpr, out2_stride0_of_2: tl.constexpr, out2_step0_of_2: tl.constexpr,
    out2_offset_of_2: tl.constexpr, out3_stride0_of_2: tl.constexpr, out3_step0_of_2: tl.constexpr,
    out3_offset_of_2: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < start_of_2:
        part1(
            program,
            x_ptr, x2_ptr, x3_ptr, out1_ptr,
            rows_of_1, cols_of_1, x_stride0_of_1, x_offset_of_1, x2_offset_of_1, x3_offset_of_1, out1_stride0_of_1,
            out1_offset_of_1,
            INDEX, BLOCK_ROWS, BLOCK_COLS,
        )
    else:
        part2(
            program - start_of_2,
            x4_ptr, x_ptr, x2_ptr, x3_ptr, out2_ptr, out3_ptr,
            rows_of_2, cols_of_2, out2_extent_of_2, x_stride0_of_2, x_offset_of_2, x_offset_2_of_2, x2_offset_of_2,
            x3_offset_of_2, x_offset_3_of_2, x_offset_4_of_2, out2_stride0_of_2, out2_step0_of_2, out2_offset_of_2,
            out3_stride0_of_2, out3_step0_of_2, out3_offset_of_2,
            INDEX, BLOCK_ROWS, BLOCK_COLS,
        )
