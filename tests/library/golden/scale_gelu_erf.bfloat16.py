# scale_gelu_erf: scale by a constant and exact GELU, in one pass
#
# Moves each operand once: x 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# Origin: library kernel scale_gelu_erf, variant builtin.
# Source: https://arxiv.org/abs/1606.08415

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
def fa_scale_gelu_erf_cc5d64(
    x_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    x = tl.load(x_ptr + index, mask=mask, other=0.0).to(tl.float32)
    scale = 0.7
    out = x * 0.35 * erfc(x * scale * -0.7071067811865476)

    tl.store(out_ptr + index, out, mask=mask)
