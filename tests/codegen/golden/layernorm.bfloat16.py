# layernorm: (x - mean) / std * weight + bias over the last dim, the row read once
#
# Moves each operand once: x 2 B/element, weight 2 B/column, bias 2 B/column, out 2 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits; FULL: BLOCK_COLS divides cols.
# Origin: library kernel layernorm, variant builtin.
# Source: https://arxiv.org/abs/1607.06450

import triton
import triton.language as tl

# ---- helpers ----


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
def fa_layernorm_e55342(
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    rows, cols, x_stride0, out_stride0,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    row_mask = row < rows
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
    mask = row_mask & col_mask
    shared_col = col + 0 * row if BLOCK_COLS >= 64 and BLOCK_COLS < 512 else col  # laid out as rows are

    x = to_float32(tl.load(x_ptr + row * x_stride0 + col, mask=mask, other=0.0))
    x_sum = tl.sum(x, axis=1, keep_dims=True)
    x_mean = mean_of(x_sum, tl.cast(cols, tl.float32))
    x_centered = x - x_mean
    x_centered_squared_sum = tl.sum(tl.where(col_mask, x_centered * x_centered, 0.0), axis=1, keep_dims=True)
    x_variance = mean_of(x_centered_squared_sum, tl.cast(cols, tl.float32))
    eps = 1e-05
    inverse_deviation = tl.rsqrt(x_variance + eps)
    weight = to_float32(tl.load(weight_ptr + shared_col, mask=col_mask, other=0.0))
    bias = to_float32(tl.load(bias_ptr + shared_col, mask=col_mask, other=0.0))
    out = x_centered * inverse_deviation * weight + bias

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
