# add_add_layer_norm_f718: add -> add -> layer_norm in one kernel
#
# Moves each operand once: x 4 B/element, bias 4 B/column, x2 4 B/element, weight 4 B/column, bias2 4 B/column,
# out1 4 B/element, out2 4 B/element.
# Maths in float32, rounded once, at the store.
# Tuning: block_rows=2 num_warps=2
# Origin: generated from the chain.

import triton
import triton.language as tl


@triton.jit
def fa_add_add_layer_norm_f718_8880ca(
    x_ptr, bias_ptr, x2_ptr, weight_ptr, bias2_ptr, out1_ptr, out2_ptr,
    rows, cols, x_stride0, x2_stride0, out1_stride0, out2_stride0,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    row_mask = row < rows
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
    mask = row_mask & col_mask

    x = tl.load(x_ptr + row * x_stride0 + col, mask=mask, other=0.0)
    bias = tl.load(bias_ptr + col, mask=col_mask, other=0.0)
    x2 = tl.load(x2_ptr + row * x2_stride0 + col, mask=mask, other=0.0)
    out1 = x + bias + x2
    total_sum = tl.sum(out1, axis=1, keep_dims=True)
    total_mean = tl.div_rn(total_sum, tl.cast(cols, tl.float32))
    total_centered = out1 - total_mean
    total_centered_squared_sum = tl.sum(tl.where(col_mask, total_centered * total_centered, 0.0), axis=1, keep_dims=True)
    total_variance = tl.div_rn(total_centered_squared_sum, tl.cast(cols, tl.float32))
    rsqrt_total = tl.rsqrt(total_variance + 1e-05)
    weight = tl.load(weight_ptr + col, mask=col_mask, other=0.0)
    bias2 = tl.load(bias2_ptr + col, mask=col_mask, other=0.0)
    out2 = total_centered * rsqrt_total * weight + bias2

    tl.store(out1_ptr + row * out1_stride0 + col, out1, mask=mask)
    tl.store(out2_ptr + row * out2_stride0 + col, out2, mask=mask)
