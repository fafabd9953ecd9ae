# dropout_add: dropout and residual add in one pass; the same seed drops the same elements
#
# Moves each operand once: residual 2 B/element, x 2 B/element, seed 8 B in all, out 2 B/element.
# Maths in float32, rounded once, at the store.
# Drops the elements whose random word (Philox4x32-10 of the seed and the row-major element number) is below
# 429496730, p = 0.1 of 2**32; the others are scaled by 1 / (1 - p).
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits; BY_FOUR: rows start at multiples of four random
# numbers.
# Origin: library kernel dropout_add, variant seeded.
# Source: https://doi.org/10.1145/2063384.2063405

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
def to_float32(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

# ---- kernel ----


@triton.jit
def fa_dropout_add_8f91c4(
    residual_ptr, x_ptr, seed_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr, BY_FOUR: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    residual = to_float32(tl.load(residual_ptr + index, mask=mask, other=0.0))
    x = to_float32(tl.load(x_ptr + index, mask=mask, other=0.0))
    seed = tl.load(seed_ptr)
    factor = dropout_factor(seed, 0, index, 429496730, 1.1111111111111112, BY_FOUR)
    out = residual + x * factor

    tl.store(out_ptr + index, out, mask=mask)
