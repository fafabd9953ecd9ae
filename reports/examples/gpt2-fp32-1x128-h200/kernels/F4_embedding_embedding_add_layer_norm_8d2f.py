# embedding_embedding_add_layer_norm_8d2f: embedding -> embedding -> add -> layer_norm in one kernel
#
# Moves each operand once: x 8 B/row, weight 4 B/column, x2 8 B/row, weight2 4 B/column, weight3 4 B/column,
# bias 4 B/column, out1 4 B/element, out2 4 B/element.
# Maths in float32, rounded once, at the store.
# Tuning: num_warps=4
# Origin: generated from the chain.

import triton
import triton.language as tl


@triton.jit
def fa_embedding_embedding_add_layer_norm_8d2f_8d3db5(
    x_ptr, weight_ptr, x2_ptr, weight2_ptr, weight3_ptr, bias_ptr, out1_ptr, out2_ptr,
    rows, cols, weight_extent, weight_step0, weight2_extent, weight2_step0, out1_stride0, out2_stride0,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    row_mask = row < rows
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
    mask = row_mask & col_mask

    x = tl.load(x_ptr + row, mask=row_mask, other=0)
    has_weight = (x >= 0) & (x < weight_extent)
    weight = tl.load(weight_ptr + x * weight_step0 + col, mask=mask & has_weight, other=float("nan"))
    x2 = tl.load(x2_ptr + row, mask=row_mask, other=0)
    has_weight2 = (x2 >= 0) & (x2 < weight2_extent)
    weight2 = tl.load(weight2_ptr + x2 * weight2_step0 + col, mask=mask & has_weight2, other=float("nan"))
    out1 = weight + weight2
    total_sum = tl.sum(tl.where(col_mask, out1, 0.0), axis=1, keep_dims=True)
    total_mean = tl.div_rn(total_sum, tl.cast(cols, tl.float32))
    total_centered = out1 - total_mean
    total_centered_squared_sum = tl.sum(tl.where(col_mask, total_centered * total_centered, 0.0), axis=1, keep_dims=True)
    total_variance = tl.div_rn(total_centered_squared_sum, tl.cast(cols, tl.float32))
    rsqrt_total = tl.rsqrt(total_variance + 1e-05)
    weight3 = tl.load(weight3_ptr + col, mask=col_mask, other=0.0)
    bias = tl.load(bias_ptr + col, mask=col_mask, other=0.0)
    out2 = total_centered * rsqrt_total * weight3 + bias

    tl.store(out1_ptr + row * out1_stride0 + col, out1, mask=mask)
    tl.store(out2_ptr + row * out2_stride0 + col, out2, mask=mask)
