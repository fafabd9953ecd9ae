# rmsnorm: x / rms(x) * weight over the last dim, the row read once
#
# Moves each operand once: weight 2 B/column, x 2 B/element, out 2 B/element.
# Maths in float32, rounded at the store, and before it where the model rounds.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits; FULL: BLOCK_COLS divides cols.
# Origin: library kernel rmsnorm, variant llama.
# Source: https://arxiv.org/abs/1910.07467

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
def fa_rmsnorm_b046df(
    weight_ptr, x_ptr, out_ptr,
    rows, cols, x_stride0, out_stride0,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    row_mask = row < rows
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
    mask = row_mask & col_mask
    shared_col = col + 0 * row if BLOCK_COLS >= 64 and BLOCK_COLS < 512 else col  # laid out as rows are

    weight = to_float32(tl.load(weight_ptr + shared_col, mask=col_mask, other=0.0))
    x = to_float32(tl.load(x_ptr + row * x_stride0 + col, mask=mask, other=0.0))
    x_squared_sum = tl.sum(x * x, axis=1, keep_dims=True)
    x_squared_mean = mean_of(x_squared_sum, tl.cast(cols, tl.float32))
    eps = 1e-06
    inverse_rms = tl.rsqrt(x_squared_mean + eps)
    out = weight * round_bf16(x * inverse_rms)

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
