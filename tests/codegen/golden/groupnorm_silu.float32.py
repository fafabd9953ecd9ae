# groupnorm_silu: normalise groups of channels and SiLU; a group's channels are read as one row
#
# Moves each operand once: x 4 B/element; weight 4 B/part of a row, the same for every i0; bias 4 B/part of a
# row, the same for every i0; out 4 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits; FULL: BLOCK_COLS divides cols; VECTORS: rows
# start at multiples of 16 elements; WHOLE: no tile lies in two parts of its row.
# Origin: library kernel groupnorm_silu, variant builtin.
# Source: https://arxiv.org/abs/1803.08494

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
def add_moments(total, squares, x, mask, count, FULL: tl.constexpr, VECTORS: tl.constexpr):
    # Eight columns more for each lane, which has 8 * count numbers so far: their squares about their own mean, and what the
    # distance of two means adds, by Chan, Golub and LeVeque (1979). No lane is past the end before the last step.
    parts = in_eights(x, VECTORS)
    is_in = in_eights(mask, VECTORS)
    before = tl.cast(8 * count, total.dtype)
    inside = 8.0 if FULL else tl.sum(is_in.to(total.dtype), axis=2)
    added = tl.sum(parts if FULL else tl.where(is_in, parts, 0.0), axis=2)
    mean = added * 0.125 if FULL else added / tl.maximum(inside, 1.0)
    deviation = parts - mean[:, :, None]
    deviation = deviation if FULL else tl.where(is_in, deviation, 0.0)
    between = added * before - total * inside
    weight = 1.0 / (tl.maximum(before, 1.0) * tl.maximum(inside, 1.0) * tl.maximum(before + inside, 1.0))
    return total + added, squares + tl.sum(deviation * deviation, axis=2) + weight * between * between


@triton.jit
def in_eights(x, VECTORS: tl.constexpr):
    # A tile's columns, eight by eight, each eight in one thread: neighbours where threads read vectors, columns an eighth of the
    # tile apart where they read single elements. Nothing is moved.
    if VECTORS:
        return tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8])
    else:
        return tl.permute(tl.reshape(x, [x.shape[0], 8, x.shape[1] // 8]), [0, 2, 1])


@triton.jit
def mean_of(total, count):
    # As near as IEEE division, by Markstein (1990): the product with the reciprocal, and a correction by what it leaves over. All
    # rows wait for their mean, and tl.div_rn is 14 instructions, a branch and a call.
    inverse = 1.0 / count
    mean = total * inverse
    rounded = tl.fma(tl.fma(mean * -1.0, count, total), inverse, mean)
    return tl.where(tl.abs(mean) < float("inf"), rounded, mean)  # infinity leaves NaN over


@triton.jit
def sigmoid(x):
    # For very negative x exp(-x) is inf and 1 / inf is 0: no overflow to guard.
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def squares_about(mean, total, squares, cols, BLOCK_COLS: tl.constexpr, VECTORS: tl.constexpr):
    # Of each lane, about the row's mean: its squares about its own plus its count times the squared distance of the two means.
    lane, lanes = tl.arange(0, BLOCK_COLS // 8)[None, :], BLOCK_COLS // 8
    rest = cols % BLOCK_COLS - 8 * lane if VECTORS else (cols % BLOCK_COLS - lane + lanes - 1) // lanes
    count = tl.cast(cols // BLOCK_COLS * 8 + tl.minimum(tl.maximum(rest, 0), 8), total.dtype)
    deviation = total / tl.maximum(count, 1.0) - mean
    return squares + count * deviation * deviation

# ---- kernel ----


@triton.jit
def fa_groupnorm_silu_e059e9(
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    rows, size1, cols, x_stride0, x_stride1, weight_extent: tl.constexpr, weight_stride1, bias_stride1,
    out_stride0, out_stride1,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr, VECTORS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    i1 = row % size1
    i0 = row // size1
    row_mask = row < rows
    x_row = x_ptr + i0 * x_stride0 + i1 * x_stride1
    out_row = out_ptr + i0 * out_stride0 + i1 * out_stride1
    eps = 1e-05

    x_sum_tile = tl.full([BLOCK_ROWS, BLOCK_COLS // 8], 0.0, tl.float32)
    x_centered_squared_sum_tile = tl.full([BLOCK_ROWS, BLOCK_COLS // 8], 0.0, tl.float32)
    for start in tl.range(0, cols, BLOCK_COLS, loop_unroll_factor=2 if VECTORS else 1):
        col = (start + tl.arange(0, BLOCK_COLS)[None, :]).to(INDEX)
        col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
        mask = row_mask & col_mask
        x = tl.load(x_row + col, mask=mask, other=0.0)
        x_sum_tile, x_centered_squared_sum_tile = add_moments(
            x_sum_tile, x_centered_squared_sum_tile, x, col_mask, start // BLOCK_COLS, FULL, VECTORS
        )
    x_sum = tl.sum(x_sum_tile, axis=1, keep_dims=True)
    x_mean = mean_of(x_sum, tl.cast(cols, tl.float32))
    x_centered_squared_sum_tile = squares_about(x_mean, x_sum_tile, x_centered_squared_sum_tile, cols, BLOCK_COLS, VECTORS)
    x_centered_squared_sum = tl.sum(x_centered_squared_sum_tile, axis=1, keep_dims=True)
    x_variance = mean_of(x_centered_squared_sum, tl.cast(cols, tl.float32))
    inverse_deviation = tl.rsqrt(x_variance + eps)

    for start in tl.range(0, cols, BLOCK_COLS, loop_unroll_factor=2 if VECTORS else 1):
        col = (start + tl.arange(0, BLOCK_COLS)[None, :]).to(INDEX)
        col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
        mask = row_mask & col_mask
        x = tl.load(x_row + col, mask=mask, other=0.0)
        x_centered = x - x_mean
        part = tl.cast((start if WHOLE else col) // weight_extent, tl.int64)
        weight = tl.load(weight_ptr + part + i1 * weight_stride1, mask=row_mask if WHOLE else mask, other=0.0)
        bias = tl.load(bias_ptr + part + i1 * bias_stride1, mask=row_mask if WHOLE else mask, other=0.0)
        total = x_centered * (inverse_deviation * weight) + bias
        out = total * sigmoid(total)
        tl.store(out_row + col, out, mask=mask)
