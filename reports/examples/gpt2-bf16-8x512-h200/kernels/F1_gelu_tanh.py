# gelu_tanh: mul -> pow -> mul -> add -> mul -> tanh -> add -> mul in one kernel
#
# Moves each operand once: x 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# Origin: library kernel gelu_tanh, variant written_out.
# Source: https://arxiv.org/abs/1606.08415

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    # For very negative x exp(-x) is inf and 1 / inf is 0: no overflow to guard.
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def fa_gelu_tanh_f8a782(
    x_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    x = tl.load(x_ptr + index, mask=mask, other=0.0).to(tl.float32)
    product = (x + x * (x * x) * 0.044715) * 1.5957691216057308
    out = x * sigmoid(product)

    tl.store(out_ptr + index, out, mask=mask)
