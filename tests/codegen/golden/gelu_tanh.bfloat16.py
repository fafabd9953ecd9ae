# gelu_tanh: GELU with the tanh approximation, in one pass
#
# Moves each operand once: x 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel gelu_tanh, variant written_out.
# Source: https://arxiv.org/abs/1606.08415

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def tanh_cdf_16bit(x):
    # The distribution function in GELU's tanh form, the sigmoid of sqrt(8 / pi) * (x + 0.044715 * x^3), as 1 / (1 + 2^t).
    root = tl.rsqrt(1.0 + tl.exp2(x * (x * x * -0.10294324 - 2.3022082)))
    return root * root  # a third of the instructions of a division


@triton.jit
def to_float32(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

# ---- kernel ----


@triton.jit
def fa_gelu_tanh_f8a782(
    x_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    x = to_float32(tl.load(x_ptr + index, mask=mask, other=0.0))
    out = x * tanh_cdf_16bit(x)

    tl.store(out_ptr + index, out, mask=mask)
