# scale_gelu_erf: scale by a constant and exact GELU, in one pass
#
# Moves each operand once: x 4 B/element, out 4 B/element.
# Maths in float32, rounded once, at the store.
# Origin: library kernel scale_gelu_erf, variant builtin.
# Source: https://arxiv.org/abs/1606.08415

import triton
import triton.language as tl


@triton.jit
def fa_scale_gelu_erf_f5f443(
    x_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    x = tl.load(x_ptr + index, mask=mask, other=0.0)
    scale = 0.7
    erfc_product = 1.0 - tl.erf(x * scale * -0.7071067811865476)
    out = x * 0.35 * erfc_product

    tl.store(out_ptr + index, out, mask=mask)
