# layernorm_gelu_erf: LayerNorm and exact GELU, in one pass
#
# Moves each operand once: x 4 B/element, weight 4 B/column, bias 4 B/column, out 4 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits; FULL: BLOCK_COLS divides cols.
# Origin: library kernel layernorm_gelu_erf, variant builtin.
# Source: https://arxiv.org/abs/1607.06450

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def erfc(x):
    # To 4 ulp, by N. Juffa: (1 + 2a) e^(a^2) erfc(a) is a polynomial in (a - 2) / (a + 2), and e^(-a^2) gets its rounding error back.
    # A squared root is a reciprocal good enough for quotients that are corrected by what they leave over; it takes no division.
    magnitude = tl.abs(x)
    a = tl.where(magnitude > 10.0546875, 10.0546875, magnitude)
    r = tl.rsqrt(a + 2.0)
    r = r * r
    q = (a - 2.0) * r
    q = tl.fma(r, tl.fma(q, -a, (q + 1.0) * -2.0 + a), q)
    p = q * -4.01139259e-4 - 1.23075210e-3
    p = p * q + 1.31355342e-3
    p = p * q + 8.63227434e-3
    p = p * q - 8.05991981e-3
    p = p * q - 5.42046614e-2
    p = p * q + 1.64055392e-1
    p = p * q - 1.66031361e-1
    p = p * q - 9.27639827e-2
    p = p * q + 2.76978403e-1
    r = tl.rsqrt(2.0 * a + 1.0)
    r = r * r
    q = tl.fma(p, r, r)
    r = tl.fma(tl.fma(q, -a, 0.5) * 2.0 + (p - q), r, q)
    square = a * a
    scaled = square * -1.4426950408889634
    error = tl.fma(square, -1.4426950408889634, -scaled) - square * 1.925963033500e-08
    power = tl.exp2(scaled)
    power = power + power * (error * 0.6931471805599453)  # no power here is infinite, where exp would put nothing back
    r = tl.fma(r, power, r * power * tl.fma(-a, a, square))
    r = tl.where(magnitude > 10.0546875, 0.0, r)
    return tl.where(x < 0.0, 2.0 - r, r)


@triton.jit
def mean_of(total, count):
    # As near as IEEE division, by Markstein (1990): the product with the reciprocal, and a correction by what it leaves over. All
    # rows wait for their mean, and tl.div_rn is 14 instructions, a branch and a call.
    inverse = 1.0 / count
    mean = total * inverse
    rounded = tl.fma(tl.fma(mean * -1.0, count, total), inverse, mean)
    return tl.where(tl.abs(mean) < float("inf"), rounded, mean)  # infinity leaves NaN over

# ---- kernel ----


@triton.jit
def fa_layernorm_gelu_erf_99cb45(
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
    out = total * 0.5 * erfc(total * -0.7071067811865476)

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
