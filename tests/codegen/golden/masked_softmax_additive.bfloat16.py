# masked_softmax_additive: scale, additive mask and softmax, in one pass
#
# Moves each operand once: scores 2 B/element; mask 2 B/element, the same for every i1; out 2 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits; FULL: BLOCK_COLS divides cols.
# Origin: library kernel masked_softmax_additive, variant upcast.
# Source: https://arxiv.org/abs/2104.04473

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
def fa_masked_softmax_additive_d191fc(
    scores_ptr, mask_ptr, out_ptr,
    rows, size1, cols, scores_stride0, scores_stride1, mask_stride0, out_stride0, out_stride1,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    i1 = row % size1
    i0 = row // size1
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    row_mask = row < rows
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
    mask = row_mask & col_mask
    scores_row = scores_ptr + i0 * scores_stride0 + i1 * scores_stride1
    out_row = out_ptr + i0 * out_stride0 + i1 * out_stride1

    scores = to_float32(tl.load(scores_row + col, mask=mask, other=0.0))
    mask_2 = to_float32(tl.load(mask_ptr + i0 * mask_stride0 + col, mask=mask, other=0.0))
    scale = 0.5
    total = scores * scale + mask_2
    total_max = tl.reduce(tl.where(col_mask, total, float("-inf")), 1, maximum, keep_dims=True)
    exp_total_shifted = exp_16bit(total - total_max)
    exp_total_shifted_sum = tl.sum(tl.where(col_mask, exp_total_shifted, 0.0), axis=1, keep_dims=True)
    inverse_sum = 1.0 / exp_total_shifted_sum
    out = exp_total_shifted * inverse_sum

    tl.store(out_row + col, out, mask=mask)
