# dropout_add_rmsnorm: dropout, residual add and RMSNorm in one pass; returns the sum and the normed rows
#
# Moves each operand once: residual 4 B/element, x 4 B/element, seed 8 B in all, weight 4 B/column, total
# 4 B/element, out 4 B/element.
# Maths in float32, rounded once, at the store.
# Drops the elements whose random word (Philox4x32-10 of the seed and the row-major element number) is below
# 429496730, p = 0.1 of 2**32; the others are scaled by 1 / (1 - p).
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits; FULL: BLOCK_COLS divides cols; BY_FOUR: rows
# start at multiples of four random numbers.
# Origin: library kernel dropout_add_rmsnorm, variant builtin.
# Source: https://doi.org/10.1145/2063384.2063405, https://arxiv.org/abs/1910.07467

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def philox(seed, counter):
    # Philox4x32-10 (Salmon et al., SC'11) of the counter (low, high, 0, 0): four random words. tl.philox computes the halves
    # of each product separately and ptxas does not join them: one wide multiplication saves a third of the issue slots.
    a = counter.to(tl.uint32)
    c = tl.zeros_like(a)
    b = c if counter.dtype.primitive_bitwidth == 32 else (counter >> 32).to(tl.uint32)
    d = c
    low_key = seed.to(tl.uint32)
    high_key = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        first = a.to(tl.uint64) * 0xD2511F53
        second = c.to(tl.uint64) * 0xCD9E8D57
        a = (second >> 32).to(tl.uint32) ^ b ^ low_key
        b = second.to(tl.uint32)
        c = (first >> 32).to(tl.uint32) ^ d ^ high_key
        d = first.to(tl.uint32)
        low_key = tl.add(low_key, 0x9E3779B9, sanitize_overflow=False)
        high_key = tl.add(high_key, 0xBB67AE85, sanitize_overflow=False)
    return a, b, c, d


@triton.jit
def dropout_factor(seed, base, col, threshold: tl.constexpr, scale: tl.constexpr, BY_FOUR: tl.constexpr):
    # 0 or the scale for element base + col, which takes one word of the counter that it shares with three neighbours. Where
    # base is a multiple of 4 the counters of a thread's neighbouring columns are visibly equal, and the compiler keeps one
    # call of four: nothing moves between threads.
    if BY_FOUR:
        counter = (base >> 2) + (col >> 2)
        lane = col & 3
    else:
        counter = (base + col) >> 2
        lane = (base + col) & 3
    a, b, c, d = philox(seed, counter)
    word = tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
    return tl.where(word >= tl.full([], threshold, tl.uint32), tl.full([], scale, tl.float32), 0.0)


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
def fa_dropout_add_rmsnorm_59c0c4(
    residual_ptr, x_ptr, seed_ptr, weight_ptr, total_ptr, out_ptr,
    rows, cols, residual_stride0, x_stride0, element_stride0, total_stride0, out_stride0,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr, BY_FOUR: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    row_mask = row < rows
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
    mask = row_mask & col_mask
    shared_col = col + 0 * row if BLOCK_COLS >= 64 and BLOCK_COLS < 256 else col  # laid out as rows are

    residual = tl.load(residual_ptr + row * residual_stride0 + col, mask=mask, other=0.0)
    x = tl.load(x_ptr + row * x_stride0 + col, mask=mask, other=0.0)
    seed = tl.load(seed_ptr)
    weight = tl.load(weight_ptr + shared_col, mask=col_mask, other=0.0)
    factor = dropout_factor(seed, row * element_stride0, col, 429496730, 1.1111111111111112, BY_FOUR)
    total = residual + x * factor
    total_squared_sum = tl.sum(tl.where(col_mask, total * total, 0.0), axis=1, keep_dims=True)
    total_squared_mean = mean_of(total_squared_sum, tl.cast(cols, tl.float32))
    eps = 1e-06
    inverse_rms = tl.rsqrt(total_squared_mean + eps)
    out = total * inverse_rms * weight

    tl.store(total_ptr + row * total_stride0 + col, total, mask=mask)
    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
