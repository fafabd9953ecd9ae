# geglu_erf: gelu(gate) * up with the exact GELU, in one pass
#
# Moves each operand once: gate 2 B/element, up 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# Origin: library kernel geglu_erf, variant builtin.
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
def fa_geglu_erf_2dee1f(
    gate_ptr, up_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    gate = tl.load(gate_ptr + index, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + index, mask=mask, other=0.0).to(tl.float32)
    product = gate * 0.5 * erfc(gate * -0.7071067811865476)
    out = product * up

    tl.store(out_ptr + index, out, mask=mask)
