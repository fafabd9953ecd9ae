# embedding_rmsnorm: token rows looked up for the residual stream, and RMS-normed for the first block
#
# Moves each operand once: ids 8 B/row, table 2 B/element, weight 2 B/column, rows 2 B/element, out 2 B/element.
# Maths in float32, rounded at the store, and before it where the model rounds.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits; FULL: BLOCK_COLS divides cols.
# Origin: library kernel embedding_rmsnorm, variant llama.
# Source: https://arxiv.org/abs/1910.07467

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


@triton.jit
def mean_of(total, count):
    # As near as IEEE division, by Markstein (1990): the product with the reciprocal, and a correction by what it leaves over. All
    # rows wait for their mean, and tl.div_rn is 14 instructions, a branch and a call.
    inverse = 1.0 / count
    mean = total * inverse
    rounded = tl.fma(tl.fma(mean * -1.0, count, total), inverse, mean)
    return tl.where(tl.abs(mean) < float("inf"), rounded, mean)  # infinity leaves NaN over


@triton.jit
def round_bf16(x):
    # Widened by a shift: after a conversion back ptxas rounds with F2F, which is slower than the F2FP that it takes here (sm_90).
    return (x.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_float32(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

# ---- kernel ----


@triton.jit
def fa_embedding_rmsnorm_65468b(
    ids_ptr, table_ptr, weight_ptr, rows_ptr, out_ptr,
    rows, cols, table_extent, table_step0, rows_stride0, out_stride0,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    row_mask = row < rows
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
    mask = row_mask & col_mask
    shared_col = col + 0 * row if BLOCK_COLS >= 64 and BLOCK_COLS < 512 else col  # laid out as rows are

    ids = tl.load(ids_ptr + row, mask=row_mask, other=0)
    table_in_bounds = checked(ids, table_extent, row_mask)
    table = to_float32(tl.load(table_ptr + ids * table_step0 + col, mask=mask & table_in_bounds, other=0.0))
    weight = to_float32(tl.load(weight_ptr + shared_col, mask=col_mask, other=0.0))
    table_squared_sum = tl.sum(table * table, axis=1, keep_dims=True)
    table_squared_mean = mean_of(table_squared_sum, tl.cast(cols, tl.float32))
    eps = 1e-06
    inverse_rms = tl.rsqrt(table_squared_mean + eps)
    out = weight * round_bf16(table * inverse_rms)

    tl.store(rows_ptr + row * rows_stride0 + col, table, mask=mask)
    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
