# log_softmax: x - max - log(sum(exp)) over the last dim, the row read once
#
# Moves each operand once: x 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits; FULL: BLOCK_COLS divides cols.
# Origin: library kernel log_softmax, variant builtin.
# Source: https://arxiv.org/abs/1805.02867

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
def fa_log_softmax_d7252c(
    x_ptr, out_ptr,
    rows, cols, x_stride0, out_stride0,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    row_mask = row < rows
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
    mask = row_mask & col_mask

    x = to_float32(tl.load(x_ptr + row * x_stride0 + col, mask=mask, other=0.0))
    x_max = tl.reduce(tl.where(col_mask, x, float("-inf")), 1, maximum, keep_dims=True)
    x_shifted = x - x_max
    exp_x_shifted_sum = tl.sum(tl.where(col_mask, exp_16bit(x_shifted), 0.0), axis=1, keep_dims=True)
    log_exp_x_shifted_sum = tl.log(exp_x_shifted_sum)
    out = x_shifted - log_exp_x_shifted_sum

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
