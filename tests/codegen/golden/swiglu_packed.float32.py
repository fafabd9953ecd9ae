# swiglu_packed: swiglu read from one packed gate/up tensor, in one pass
#
# Moves each operand once: packed 4 B/element, out 4 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel swiglu_packed, variant chunk.
# Source: https://arxiv.org/abs/2002.05202

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
def sigmoid(x):
    # For very negative x exp(-x) is inf and 1 / inf is 0: no overflow to guard.
    return 1.0 / (1.0 + exp(-x))

# ---- kernel ----


@triton.jit
def fa_swiglu_packed_03aa8d(
    packed_ptr, out_ptr,
    rows, cols: tl.constexpr, packed_stride0: tl.constexpr, packed_offset: tl.constexpr, out_stride0: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = tl.program_id(0)
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask

    packed = tl.load(packed_ptr + row * packed_stride0 + col, mask=mask, other=0.0)
    packed_shifted = tl.load(packed_ptr + row * packed_stride0 + col + packed_offset, mask=mask, other=0.0)
    out = packed * sigmoid(packed) * packed_shifted

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
