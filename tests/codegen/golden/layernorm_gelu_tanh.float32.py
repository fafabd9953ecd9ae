# layernorm_gelu_tanh: LayerNorm and GELU with the tanh approximation, in one pass
#
# Moves each operand once: x 4 B/element, weight 4 B/column, bias 4 B/column, out 4 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits; FULL: BLOCK_COLS divides cols.
# Origin: library kernel layernorm_gelu_tanh, variant builtin.
# Source: https://arxiv.org/abs/1607.06450

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def exp(x):
    # tl.exp rounds x * log2(e) once, which costs |x| / 2 ulp; the product's rounding error is put back here.
    scaled = x * 1.4426950408889634
    error = tl.fma(x, 1.4426950408889634, -scaled) + x * 1.925963033500e-08
    power = tl.exp2(scaled)
    # At 0 and inf there is nothing to put back, and an infinite x has no error: inf - inf would be NaN.
    return tl.where((power > 0.0) & (power < float("inf")), power + power * (error * 0.6931471805599453), power)


@triton.jit
def mean_of(total, count):
    # As near as IEEE division, by Markstein (1990): the product with the reciprocal, and a correction by what it leaves over. All
    # rows wait for their mean, and tl.div_rn is 14 instructions, a branch and a call.
    inverse = 1.0 / count
    mean = total * inverse
    rounded = tl.fma(tl.fma(mean * -1.0, count, total), inverse, mean)
    return tl.where(tl.abs(mean) < float("inf"), rounded, mean)  # infinity leaves NaN over


@triton.jit
def sigmoid(x):
    # For very negative x exp(-x) is inf and 1 / inf is 0: no overflow to guard.
    return 1.0 / (1.0 + exp(-x))

# ---- kernel ----


@triton.jit
def fa_layernorm_gelu_tanh_a6246b(
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    rows, cols, x_stride0, out_stride0,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    row_mask = row < rows
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
    mask = row_mask & col_mask
    shared_col = col + 0 * row if BLOCK_COLS >= 64 and BLOCK_COLS < 256 else col  # laid out as rows are

    x = tl.load(x_ptr + row * x_stride0 + col, mask=mask, other=0.0)
    x_sum = tl.sum(x, axis=1, keep_dims=True)
    x_mean = mean_of(x_sum, tl.cast(cols, tl.float32))
    x_centered = x - x_mean
    x_centered_squared_sum = tl.sum(tl.where(col_mask, x_centered * x_centered, 0.0), axis=1, keep_dims=True)
    x_variance = mean_of(x_centered_squared_sum, tl.cast(cols, tl.float32))
    eps = 1e-05
    inverse_deviation = tl.rsqrt(x_variance + eps)
    weight = tl.load(weight_ptr + shared_col, mask=col_mask, other=0.0)
    bias = tl.load(bias_ptr + shared_col, mask=col_mask, other=0.0)
    total = x_centered * inverse_deviation * weight + bias
    product = (total + total * (total * total) * 0.044715) * 1.5957691216057308
    out = total * sigmoid(product)

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
