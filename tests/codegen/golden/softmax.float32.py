# softmax: exp(x - max) / sum over the last dim, the row read once
#
# Moves each operand once: x 4 B/element, out 4 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits; FULL: BLOCK_COLS divides cols.
# Origin: library kernel softmax, variant builtin.
# Source: https://arxiv.org/abs/1805.02867

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
def maximum(a, b):
    # tl.max would drop a NaN.
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

# ---- kernel ----


@triton.jit
def fa_softmax_91032e(
    x_ptr, out_ptr,
    rows, cols, x_stride0, out_stride0,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    row_mask = row < rows
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
    mask = row_mask & col_mask

    x = tl.load(x_ptr + row * x_stride0 + col, mask=mask, other=0.0)
    x_max = tl.reduce(tl.where(col_mask, x, float("-inf")), 1, maximum, keep_dims=True)
    exp_x_shifted = exp(x - x_max)
    exp_x_shifted_sum = tl.sum(tl.where(col_mask, exp_x_shifted, 0.0), axis=1, keep_dims=True)
    inverse_sum = tl.div_rn(1.0, exp_x_shifted_sum)
    out = exp_x_shifted * inverse_sum

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
