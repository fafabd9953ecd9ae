# geglu_tanh: gelu_tanh(gate) * up, the gated activation of Gemma and T5 v1.1
#
# Moves each operand once: gate 2 B/element, up 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# Origin: library kernel geglu_tanh, variant builtin.
# Source: https://arxiv.org/abs/2002.05202

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    # For very negative x exp(-x) is inf and 1 / inf is 0: no overflow to guard.
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def fa_geglu_tanh_279849(
    gate_ptr, up_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    gate = tl.load(gate_ptr + index, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + index, mask=mask, other=0.0).to(tl.float32)
    product = (gate + gate * (gate * gate) * 0.044715) * 1.5957691216057308
    out = gate * sigmoid(product) * up

    tl.store(out_ptr + index, out, mask=mask)
