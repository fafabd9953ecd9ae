# softcap: cap * tanh(x / cap), in one pass
#
# Moves each operand once: x 4 B/element, out 4 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel softcap, variant tanh.
# Source: https://arxiv.org/abs/2408.00118

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def tanh(x):
    # exp(-2|x|) cannot overflow; below 0.6 it would cancel, so a polynomial (0.95 ulp) takes over.
    magnitude = tl.abs(x)
    decay = tl.exp(-2.0 * magnitude)
    large = (1.0 - decay) / (1.0 + decay)
    z = x * x
    poly = -0.005941229777061586
    poly = poly * z + 0.02087326660642162
    poly = poly * z - 0.05381832378656157
    poly = poly * z + 0.13332457825460658
    poly = poly * z - 0.3333332129699339
    result = tl.where(magnitude < 0.6, magnitude + magnitude * (z * poly), large)
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000  # put back as a bit: -0 stays -0
    return (result.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)

# ---- kernel ----


@triton.jit
def fa_softcap_5106c3(
    x_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    x = tl.load(x_ptr + index, mask=mask, other=0.0)
    cap = 30.0
    out = cap * tanh(tl.div_rn(x, cap))

    tl.store(out_ptr + index, out, mask=mask)
