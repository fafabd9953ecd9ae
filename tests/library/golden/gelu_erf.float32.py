# gelu_erf: GELU with the exact Gaussian distribution function, in one pass
#
# Moves each operand once: x 4 B/element, out 4 B/element.
# Maths in float32, rounded once, at the store.
# Origin: library kernel gelu_erf, variant builtin.
# Source: https://arxiv.org/abs/1606.08415

import triton
import triton.language as tl


@triton.jit
def fa_gelu_erf_872a3e(
    x_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    x = tl.load(x_ptr + index, mask=mask, other=0.0)
    out = x * 0.5 * (1.0 - tl.erf(x * -0.7071067811865476))

    tl.store(out_ptr + index, out, mask=mask)
