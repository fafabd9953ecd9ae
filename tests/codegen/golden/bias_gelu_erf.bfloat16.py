# bias_gelu_erf: bias add and exact GELU, in one pass
#
# Moves each operand once: x 2 B/element, bias 2 B/column, out 2 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel bias_gelu_erf, variant builtin.
# Source: https://arxiv.org/abs/2104.04473

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def normal_cdf_16bit(x):
    # The normal distribution function to 3e-4 of itself down to x = -5.7 and to 3e-3 down to x = -13.3, where bfloat16 ends,
    # whose rounding costs 4e-3: 2 to the power of a polynomial in |x|, which is the minimax fit of log2(cdf(-|x|)). The sign of
    # its last coefficient makes it -inf for x = -inf.
    magnitude = tl.abs(x)
    power = -4.6692085e-07
    power = power * magnitude + 2.4229113e-05
    power = power * magnitude - 0.0005259484
    power = power * magnitude + 0.0063268477
    power = power * magnitude - 0.047913346
    power = power * magnitude - 0.4664553
    power = power * magnitude - 1.1472828
    power = power * magnitude - 1.0003203
    tail = tl.exp2(power)
    return tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def to_float32(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

# ---- kernel ----


@triton.jit
def fa_bias_gelu_erf_155701(
    x_ptr, bias_ptr, out_ptr,
    rows, cols: tl.constexpr, x_stride0: tl.constexpr, out_stride0: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = tl.program_id(0)
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask
    shared_col = col + 0 * row if BLOCK_COLS >= 128 and BLOCK_COLS < 1024 else col  # laid out as rows are

    x = to_float32(tl.load(x_ptr + row * x_stride0 + col, mask=mask, other=0.0))
    bias = to_float32(tl.load(bias_ptr + shared_col, mask=col_mask, other=0.0))
    total = x + bias
    out = total * normal_cdf_16bit(total)

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
