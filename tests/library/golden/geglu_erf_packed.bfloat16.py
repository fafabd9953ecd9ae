# geglu_erf_packed: geglu_erf read from one packed gate/up tensor, in one pass
#
# Moves each operand once: packed 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# Origin: library kernel geglu_erf_packed, variant chunk.
# Source: https://arxiv.org/abs/2002.05202

import triton
import triton.language as tl


@triton.jit
def erfc(x):
    # exp(-x * x) times a polynomial in 1 / (1 + 0.44 |x|), fitted to 6e-6 of erfc(|x|) at any x: the tail keeps its digits, and
    # results are rounded to 11 bits at most.
    t = tl.rsqrt(1.0 + 0.44 * tl.abs(x))
    t = t * t  # a third of the instructions of a division
    poly = -0.14544582
    poly = poly * t + 0.3488371
    poly = poly * t + 0.04261189
    poly = poly * t + 0.26267788
    poly = poly * t + 0.24277207
    poly = poly * t + 0.2485445
    tail = poly * t * tl.exp2(x * x * -1.4426950408889634)
    return tl.where(x < 0.0, 2.0 - tail, tail)


@triton.jit
def fa_geglu_erf_packed_32495f(
    packed_ptr, out_ptr,
    rows, cols, packed_stride0, packed_offset, out_stride0,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = tl.program_id(0)
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask

    packed = tl.load(packed_ptr + row * packed_stride0 + col, mask=mask, other=0.0).to(tl.float32)
    packed_shifted = tl.load(packed_ptr + row * packed_stride0 + col + packed_offset, mask=mask, other=0.0).to(tl.float32)
    product = packed * 0.5 * erfc(packed * -0.7071067811865476)
    out = product * packed_shifted

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
