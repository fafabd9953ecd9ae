# causal_softmax: scale, causal mask and softmax in one pass; no mask is read, and nothing of the scores that it
# hides
#
# Moves each operand once: x 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits; FULL: BLOCK_COLS divides cols.
# Origin: library kernel causal_softmax, variant triu.
# Source: https://arxiv.org/abs/1706.03762

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def exp_16bit(x):
    # Of a difference from a maximum, for results that are rounded to 11 bits at most. tl.exp takes three instructions more for what
    # is below 2^-126, which is 0 here.
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def maximum(a, b):
    # tl.max would drop a NaN.
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def to_float32(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

# ---- kernel ----


@triton.jit
def fa_causal_softmax_f440cd(
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
    x = to_float32(tl.load(x_row + col, mask=mask & (col // 8 * 8 <= i1), other=0.0))
    scale = 0.08838834764831845
    selected = tl.where(is_kept, tl.fma(x, scale, 0.0), float("-inf"))
    selected_max = tl.reduce(tl.where(col_mask, selected, float("-inf")), 1, maximum, keep_dims=True)
    exp_selected_shifted = exp_16bit(selected - selected_max)
    exp_selected_shifted_sum = tl.sum(tl.where(col_mask, exp_selected_shifted, 0.0), axis=1, keep_dims=True)
    inverse_sum = 1.0 / exp_selected_shifted_sum
    out = exp_selected_shifted * inverse_sum

    tl.store(out_row + col, out, mask=mask)
