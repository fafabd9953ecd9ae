# geglu_erf: gelu(gate) * up with the exact GELU, in one pass
#
# Moves each operand once: gate 4 B/element, up 4 B/element, out 4 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel geglu_erf, variant builtin.
# Source: https://arxiv.org/abs/2002.05202

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def erfc(x):
    # To 4 ulp, by N. Juffa: (1 + 2a) e^(a^2) erfc(a) is a polynomial in (a - 2) / (a + 2), and e^(-a^2) gets its rounding error back.
    # A squared root is a reciprocal good enough for quotients that are corrected by what they leave over; it takes no division.
    magnitude = tl.abs(x)
    a = tl.where(magnitude > 10.0546875, 10.0546875, magnitude)
    r = tl.rsqrt(a + 2.0)
    r = r * r
    q = (a - 2.0) * r
    q = tl.fma(r, tl.fma(q, -a, (q + 1.0) * -2.0 + a), q)
    p = q * -4.01139259e-4 - 1.23075210e-3
    p = p * q + 1.31355342e-3
    p = p * q + 8.63227434e-3
    p = p * q - 8.05991981e-3
    p = p * q - 5.42046614e-2
    p = p * q + 1.64055392e-1
    p = p * q - 1.66031361e-1
    p = p * q - 9.27639827e-2
    p = p * q + 2.76978403e-1
    r = tl.rsqrt(2.0 * a + 1.0)
    r = r * r
    q = tl.fma(p, r, r)
    r = tl.fma(tl.fma(q, -a, 0.5) * 2.0 + (p - q), r, q)
    square = a * a
    scaled = square * -1.4426950408889634
    error = tl.fma(square, -1.4426950408889634, -scaled) - square * 1.925963033500e-08
    power = tl.exp2(scaled)
    power = power + power * (error * 0.6931471805599453)  # no power here is infinite, where exp would put nothing back
    r = tl.fma(r, power, r * power * tl.fma(-a, a, square))
    r = tl.where(magnitude > 10.0546875, 0.0, r)
    return tl.where(x < 0.0, 2.0 - r, r)

# ---- kernel ----


@triton.jit
def fa_geglu_erf_3c9577(
    gate_ptr, up_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    gate = tl.load(gate_ptr + index, mask=mask, other=0.0)
    up = tl.load(up_ptr + index, mask=mask, other=0.0)
    product = gate * 0.5 * erfc(gate * -0.7071067811865476)
    out = product * up

    tl.store(out_ptr + index, out, mask=mask)
