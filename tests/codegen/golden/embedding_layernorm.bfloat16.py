# embedding_layernorm: token rows looked up and LayerNormed in one pass
#
# Moves each operand once: ids 8 B/row, table 2 B/element, weight 2 B/column, bias 2 B/column, out 2 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits; FULL: BLOCK_COLS divides cols.
# Origin: library kernel embedding_layernorm, variant builtin.
# Source: https://arxiv.org/abs/1607.06450

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
def to_float32(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

# ---- kernel ----


@triton.jit
def fa_embedding_layernorm_724c10(
    ids_ptr, table_ptr, weight_ptr, bias_ptr, out_ptr,
    rows, cols, table_extent, table_step0, out_stride0,
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
    table_sum = tl.sum(table, axis=1, keep_dims=True)
    table_mean = mean_of(table_sum, tl.cast(cols, tl.float32))
    table_centered = table - table_mean
    table_centered_squared_sum = tl.sum(tl.where(col_mask, table_centered * table_centered, 0.0), axis=1, keep_dims=True)
    table_variance = mean_of(table_centered_squared_sum, tl.cast(cols, tl.float32))
    eps = 1e-05
    inverse_deviation = tl.rsqrt(table_variance + eps)
    weight = to_float32(tl.load(weight_ptr + shared_col, mask=col_mask, other=0.0))
    bias = to_float32(tl.load(bias_ptr + shared_col, mask=col_mask, other=0.0))
    out = table_centered * inverse_deviation * weight + bias

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
