# scale_gelu_erf: scale by a constant and exact GELU, in one pass
#
# Moves each operand once: x 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel scale_gelu_erf, variant builtin.
# Source: https://arxiv.org/abs/1606.08415

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def normal_cdf_16bit(x):
    # The normal distribution function to 3e-4 of itself down to x = -5.7 and to 3e-3 down to x = -13.3, where bfloat16 ends,
    # whose rounding costs 4e-3: 2 to the power of a polynomial in |x|, which is the minimax fit of log2(cdf(-|x|)). The sign of
    # its last coefficient makes it -inf for x = -inf.
    magnitude = tl.abs(x)
    power = -4.6692085e-07
    power = power * magnitude + 2.4229113e-05
    power = power * magnitude - 0.0005259484
    power = power * magnitude + 0.0063268477
    power = power * magnitude - 0.047913346
    power = power * magnitude - 0.4664553
    power = power * magnitude - 1.1472828
    power = power * magnitude - 1.0003203
    tail = tl.exp2(power)
    return tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def to_float32(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

# ---- kernel ----


@triton.jit
def fa_scale_gelu_erf_aee64e(
    x_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    x = to_float32(tl.load(x_ptr + index, mask=mask, other=0.0))
    scale = 0.7
    product = x * scale
    out = product * normal_cdf_16bit(product)

    tl.store(out_ptr + index, out, mask=mask)
