# embedding_embedding_add_layer_norm_e1b6: embedding -> embedding -> add -> layer_norm in one kernel
#
# Moves each operand once: x 8 B/row, weight 2 B/column, x2 8 B/row, weight2 2 B/column, weight3 2 B/column,
# bias 2 B/column, out1 2 B/element, out2 2 B/element.
# Maths in float32, rounded once, at the store.
# Origin: generated from the chain.

import triton
import triton.language as tl


@triton.jit
def wide(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def fa_embedding_embedding_add_layer_norm_e1b6_c74322(
    x_ptr, weight_ptr, x2_ptr, weight2_ptr, weight3_ptr, bias_ptr, out1_ptr, out2_ptr,
    rows, size1, cols, x_stride0, weight_extent, weight_step0, weight2_extent, weight2_step0, out1_stride0,
    out1_stride1, out2_stride0, out2_stride1,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    i1 = row % size1
    i0 = row // size1
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    row_mask = row < rows
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
    mask = row_mask & col_mask
    x_row = x_ptr + i0 * x_stride0 + i1
    out1_row = out1_ptr + i0 * out1_stride0 + i1 * out1_stride1
    out2_row = out2_ptr + i0 * out2_stride0 + i1 * out2_stride1

    x = tl.load(x_row, mask=row_mask, other=0)
    has_weight = (x >= 0) & (x < weight_extent)
    weight = wide(tl.load(weight_ptr + x * weight_step0 + col, mask=mask & has_weight, other=float("nan")))
    x2 = tl.load(x2_ptr + i1, mask=row_mask, other=0)
    has_weight2 = (x2 >= 0) & (x2 < weight2_extent)
    weight2 = wide(tl.load(weight2_ptr + x2 * weight2_step0 + col, mask=mask & has_weight2, other=float("nan")))
    out1 = weight + weight2
    total_sum = tl.sum(tl.where(col_mask, out1, 0.0), axis=1, keep_dims=True)
    total_mean = tl.div_rn(total_sum, tl.cast(cols, tl.float32))
    total_centered = out1 - total_mean
    total_centered_squared_sum = tl.sum(tl.where(col_mask, total_centered * total_centered, 0.0), axis=1, keep_dims=True)
    total_variance = tl.div_rn(total_centered_squared_sum, tl.cast(cols, tl.float32))
    rsqrt_total = tl.rsqrt(total_variance + 1e-05)
    weight3 = wide(tl.load(weight3_ptr + col, mask=col_mask, other=0.0))
    bias = wide(tl.load(bias_ptr + col, mask=col_mask, other=0.0))
    out2 = total_centered * rsqrt_total * weight3 + bias

    tl.store(out1_row + col, out1, mask=mask)
    tl.store(out2_row + col, out2, mask=mask)
