# qk_norm_rope: per-head RMSNorm and rotary embedding, in one pass, x read where the projection wrote it
#
# Moves each operand once: weight 4 B/column, x 4 B/element, cos 4 B/element, sin 4 B/element, out 4 B/element.
# Maths in float32, rounded once, at the store.
# Origin: library kernel qk_norm_rope, variant llama.
# Source: https://arxiv.org/abs/2505.09388

import triton
import triton.language as tl


@triton.jit
def fa_qk_norm_rope_8278d3(
    weight_ptr, x_ptr, cos_ptr, sin_ptr, out_ptr,
    rows, size1, cols, x_stride0, x_stride1, cos_stride0, weight_offset, x_offset, weight_offset_2, x_offset_2,
    sin_stride0, out_stride0, out_stride1,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    i1 = row % size1
    i0 = row // size1
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask
    x_row = x_ptr + i0 * x_stride0 + i1 * x_stride1
    out_row = out_ptr + i0 * out_stride0 + i1 * out_stride1

    weight = tl.load(weight_ptr + col, mask=col_mask, other=0.0)
    x = tl.load(x_row + col, mask=mask, other=0.0)
    cos = tl.load(cos_ptr + i0 * cos_stride0 + col, mask=mask, other=0.0)
    is_ge = col >= 64
    weight_shifted = tl.load(weight_ptr + col + weight_offset, mask=col_mask & is_ge, other=0.0)
    x_shifted = tl.load(x_row + col + x_offset, mask=mask & is_ge, other=0.0)
    is_lt = col < 64
    weight_shifted_2 = tl.load(weight_ptr + col + weight_offset_2, mask=col_mask & is_lt, other=0.0)
    x_shifted_2 = tl.load(x_row + col + x_offset_2, mask=mask & is_lt, other=0.0)
    sin = tl.load(sin_ptr + i0 * sin_stride0 + col, mask=mask, other=0.0)
    x_squared_sum = tl.sum(x * x, axis=1, keep_dims=True)
    x_squared_mean = tl.div_rn(x_squared_sum, tl.cast(cols, tl.float32))
    eps = 1e-06
    inverse_rms = tl.rsqrt(x_squared_mean + eps)
    product = weight_shifted_2 * (inverse_rms * x_shifted_2)
    chosen = tl.where(is_lt, -product, weight_shifted * (inverse_rms * x_shifted))
    out = weight * (x * inverse_rms) * cos + chosen * sin

    tl.store(out_row + col, out, mask=mask)
