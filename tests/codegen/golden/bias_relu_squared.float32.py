# bias_relu_squared: bias add and ReLU squared, in one pass
#
# Moves each operand once: x 4 B/element, bias 4 B/column, out 4 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel bias_relu_squared, variant builtin.
# Source: https://arxiv.org/abs/2109.08668

import triton
import triton.language as tl


@triton.jit
def fa_bias_relu_squared_220457(
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
    maximum_total = tl.maximum(x + bias, 0.0, propagate_nan=tl.PropagateNan.ALL)
    out = maximum_total * maximum_total

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
