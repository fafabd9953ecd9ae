# bias_silu: bias add and SiLU, in one pass
#
# Moves each operand once: x 2 B/element, bias 2 B/column, out 2 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel bias_silu, variant builtin.
# Source: https://arxiv.org/abs/1702.03118

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def sigmoid_16bit(x):
    # For results that are rounded to 11 bits at most. tl.exp, and the division, would take four instructions more each, and
    # the root keeps what is below 2^-126.
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def to_float32(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

# ---- kernel ----


@triton.jit
def fa_bias_silu_9ede81(
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
    out = total * sigmoid_16bit(total)

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
