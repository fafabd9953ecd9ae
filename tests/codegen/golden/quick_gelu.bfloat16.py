# quick_gelu: x * sigmoid(1.702 x), CLIP's activation, in one pass
#
# Moves each operand once: x 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel quick_gelu, variant sigmoid.
# Source: https://arxiv.org/abs/1606.08415

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def sigmoid_16bit(x):
    # For results that are rounded to 11 bits at most. tl.exp, and the division, would take four instructions more each, and
    # the root keeps what is below 2^-126.
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def to_float32(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

# ---- kernel ----


@triton.jit
def fa_quick_gelu_a38790(
    x_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    x = to_float32(tl.load(x_ptr + index, mask=mask, other=0.0))
    out = x * sigmoid_16bit(x * 1.702)

    tl.store(out_ptr + index, out, mask=mask)
