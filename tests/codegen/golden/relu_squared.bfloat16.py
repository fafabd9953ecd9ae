# relu_squared: max(x, 0) squared, in one pass
#
# Moves each operand once: x 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel relu_squared, variant square.
# Source: https://arxiv.org/abs/2109.08668

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def to_float32(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

# ---- kernel ----


@triton.jit
def fa_relu_squared_e58892(
    x_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    x = to_float32(tl.load(x_ptr + index, mask=mask, other=0.0))
    maximum_x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    out = maximum_x * maximum_x

    tl.store(out_ptr + index, out, mask=mask)
