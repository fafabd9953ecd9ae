# gelu_tanh: GELU with the tanh approximation, in one pass
#
# Moves each operand once: x 4 B/element, out 4 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel gelu_tanh, variant written_out.
# Source: https://arxiv.org/abs/1606.08415

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
def fa_gelu_tanh_361267(
    x_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    x = tl.load(x_ptr + index, mask=mask, other=0.0)
    product = (x + x * (x * x) * 0.044715) * 1.5957691216057308
    out = x * sigmoid(product)

    tl.store(out_ptr + index, out, mask=mask)
