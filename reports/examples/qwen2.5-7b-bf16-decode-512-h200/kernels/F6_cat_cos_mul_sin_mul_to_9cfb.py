# cat_cos_mul_sin_mul_to_9cfb: cat -> cos -> mul -> sin -> mul -> to -> to in one kernel
#
# Moves each operand once: x 4 B/element, out1 2 B/element, out2 2 B/element.
# Maths in float32, rounded once, at the store.
# Tuning: block_cols=128 num_warps=4
# Origin: generated from the chain.

import triton
import triton.language as tl


@triton.jit
def fa_cat_cos_mul_sin_mul_to_9cfb_4981d4(
    x_ptr, out1_ptr, out2_ptr,
    size, out1_offset, out2_offset,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    x = tl.load(x_ptr + index, mask=mask, other=0.0)
    cos_x = tl.cos(x)
    sin_x = tl.sin(x)

    tl.store(out1_ptr + index, cos_x, mask=mask)
    tl.store(out1_ptr + index + out1_offset, cos_x, mask=mask)
    tl.store(out2_ptr + index, sin_x, mask=mask)
    tl.store(out2_ptr + index + out2_offset, sin_x, mask=mask)
