# causal_softmax: scale, causal mask and softmax in one pass; no mask is read, and nothing of the scores that it
# hides
#
# Moves each operand once: x 4 B/element, out 4 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits; FULL: BLOCK_COLS divides cols.
# Origin: library kernel causal_softmax, variant triu.
# Source: https://arxiv.org/abs/1706.03762

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
def fa_causal_softmax_0aef9a(
    x_ptr, out_ptr,
    rows, size1, cols, x_stride0, x_stride1, out_stride0, out_stride1,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    i1 = row % size1
    i0 = row // size1
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    row_mask = row < rows
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
    mask = row_mask & col_mask
    x_row = x_ptr + i0 * x_stride0 + i1 * x_stride1
    out_row = out_ptr + i0 * out_stride0 + i1 * out_stride1

    is_kept = col <= i1
    x = tl.load(x_row + col, mask=mask & (col // 4 * 4 <= i1), other=0.0)
    scale = 0.08838834764831845
    selected = tl.where(is_kept, tl.fma(x, scale, 0.0), float("-inf"))
    selected_max = tl.reduce(tl.where(col_mask, selected, float("-inf")), 1, maximum, keep_dims=True)
    exp_selected_shifted = exp(selected - selected_max)
    exp_selected_shifted_sum = tl.sum(tl.where(col_mask, exp_selected_shifted, 0.0), axis=1, keep_dims=True)
    inverse_sum = tl.div_rn(1.0, exp_selected_shifted_sum)
    out = exp_selected_shifted * inverse_sum

    tl.store(out_row + col, out, mask=mask)
