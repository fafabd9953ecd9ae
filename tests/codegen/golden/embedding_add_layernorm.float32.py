# embedding_add_layernorm: word, token type and position rows looked up, added and LayerNormed in one pass
#
# Moves each operand once: ids 8 B/row; words 4 B/element; type_ids 8 B/row; types 4 B/element; position_ids
# 8 B/row, the same for every i0; positions 4 B/element, the same for every i0; weight 4 B/column; bias
# 4 B/column; out 4 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits; FULL: BLOCK_COLS divides cols.
# Origin: library kernel embedding_add_layernorm, variant type_first.
# Source: https://arxiv.org/abs/1810.04805

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def checked(place, extent, wanted):
    # Whether a position lies in its tensor. One that does not stops the kernel, as it stops torch's: where nothing is wanted,
    # past the end for instance, no position counts. The launch asks for assertions (debug=True).
    is_inside = (place >= 0) & (place < extent)
    tl.device_assert(is_inside | (wanted == 0), "position out of range")
    return is_inside & (wanted != 0)


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
def fa_embedding_add_layernorm_b51c13(
    ids_ptr, words_ptr, type_ids_ptr, types_ptr, position_ids_ptr, positions_ptr, weight_ptr, bias_ptr, out_ptr,
    rows, size1, cols, ids_stride0, words_extent, words_step0, type_ids_stride0, types_extent, types_step0,
    positions_extent, positions_step0, out_stride0, out_stride1,
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
    ids_row = ids_ptr + i0 * ids_stride0 + i1
    type_ids_row = type_ids_ptr + i0 * type_ids_stride0 + i1
    out_row = out_ptr + i0 * out_stride0 + i1 * out_stride1

    ids = tl.load(ids_row, mask=row_mask, other=0)
    words_in_bounds = checked(ids, words_extent, row_mask)
    words = tl.load(words_ptr + ids * words_step0 + col, mask=mask & words_in_bounds, other=0.0)
    type_ids = tl.load(type_ids_row, mask=row_mask, other=0)
    types_in_bounds = checked(type_ids, types_extent, row_mask)
    types = tl.load(types_ptr + type_ids * types_step0 + col, mask=mask & types_in_bounds, other=0.0)
    position_ids = tl.load(position_ids_ptr + i1, mask=row_mask, other=0)
    positions_in_bounds = checked(position_ids, positions_extent, row_mask)
    positions = tl.load(positions_ptr + position_ids * positions_step0 + col, mask=mask & positions_in_bounds, other=0.0)
    total = words + types + positions
    total_sum = tl.sum(total, axis=1, keep_dims=True)
    total_mean = mean_of(total_sum, tl.cast(cols, tl.float32))
    total_centered = total - total_mean
    total_centered_squared_sum = tl.sum(tl.where(col_mask, total_centered * total_centered, 0.0), axis=1, keep_dims=True)
    total_variance = mean_of(total_centered_squared_sum, tl.cast(cols, tl.float32))
    eps = 1e-12
    inverse_deviation = tl.rsqrt(total_variance + eps)
    weight = tl.load(weight_ptr + shared_col, mask=col_mask, other=0.0)
    bias = tl.load(bias_ptr + shared_col, mask=col_mask, other=0.0)
    out = total_centered * inverse_deviation * weight + bias

    tl.store(out_row + col, out, mask=mask)
