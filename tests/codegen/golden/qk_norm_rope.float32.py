# qk_norm_rope: per-head RMSNorm and rotary embedding, in one pass, x read where the projection wrote it
#
# Moves each operand once: weight 4 B/column; x 4 B/element; cos 4 B/element, the same for every i1; sin
# 4 B/element, the same for every i1; out 4 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits; FULL: BLOCK_COLS divides cols.
# Origin: library kernel qk_norm_rope, variant llama.
# Source: https://arxiv.org/abs/2505.09388

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

# ---- kernel ----


@triton.jit
def fa_qk_norm_rope_d395f9(
    weight_ptr, x_ptr, cos_ptr, sin_ptr, out_ptr,
    rows, size1, cols, weight_offset, x_stride0, x_stride1, x_offset, cos_stride0, cos_offset, sin_stride0,
    sin_offset, out_stride0, out_stride1, out_offset,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    i1 = row % size1
    i0 = row // size1
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    row_mask = row < rows
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
    mask = row_mask & col_mask
    shared_col = col + 0 * row if BLOCK_COLS >= 64 and BLOCK_COLS < 256 else col  # laid out as rows are
    x_row = x_ptr + i0 * x_stride0 + i1 * x_stride1
    out_row = out_ptr + i0 * out_stride0 + i1 * out_stride1

    x = tl.load(x_row + col, mask=mask, other=0.0)
    x_shifted = tl.load(x_row + col + x_offset, mask=mask, other=0.0)
    cos = tl.load(cos_ptr + i0 * cos_stride0 + col, mask=mask, other=0.0)
    cos_shifted = tl.load(cos_ptr + i0 * cos_stride0 + col + cos_offset, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + i0 * sin_stride0 + col, mask=mask, other=0.0)
    sin_shifted = tl.load(sin_ptr + i0 * sin_stride0 + col + sin_offset, mask=mask, other=0.0)
    eps = 1e-06
    total_sum = tl.sum(x * x + x_shifted * x_shifted, axis=1, keep_dims=True)
    weight = tl.load(weight_ptr + shared_col, mask=col_mask, other=0.0)
    weight_shifted = tl.load(weight_ptr + shared_col + weight_offset, mask=col_mask, other=0.0)
    product = 2.0 * tl.cast(cols, tl.float32)
    rsqrt_total = tl.rsqrt(eps + mean_of(total_sum, product))
    product_2 = weight * (x * rsqrt_total)
    product_3 = weight_shifted * (x_shifted * rsqrt_total)
    out = product_2 * cos + product_3 * -1.0 * sin
    out_shifted = product_3 * cos_shifted + product_2 * sin_shifted

    tl.store(out_row + col, out, mask=mask)
    tl.store(out_row + col + out_offset, out_shifted, mask=mask)
