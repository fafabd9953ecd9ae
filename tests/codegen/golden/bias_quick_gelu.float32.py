# bias_quick_gelu: bias add and QuickGELU, in one pass
#
# Moves each operand once: x 4 B/element, bias 4 B/column, out 4 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel bias_quick_gelu, variant builtin.
# Source: https://arxiv.org/abs/2104.04473

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
def sigmoid(x):
    # For very negative x exp(-x) is inf and 1 / inf is 0: no overflow to guard.
    return 1.0 / (1.0 + exp(-x))

# ---- kernel ----


@triton.jit
def fa_bias_quick_gelu_71cc13(
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
    shared_col = col + 0 * row if BLOCK_COLS >= 128 and BLOCK_COLS < 512 else col  # laid out as rows are

    x = tl.load(x_ptr + row * x_stride0 + col, mask=mask, other=0.0)
    bias = tl.load(bias_ptr + shared_col, mask=col_mask, other=0.0)
    total = x + bias
    out = total * sigmoid(total * 1.702)

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
