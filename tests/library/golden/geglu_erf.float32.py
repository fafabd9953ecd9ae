# geglu_erf: gelu(gate) * up with the exact GELU, in one pass
#
# Moves each operand once: gate 4 B/element, up 4 B/element, out 4 B/element.
# Maths in float32, rounded once, at the store.
# Origin: library kernel geglu_erf, variant builtin.
# Source: https://arxiv.org/abs/2002.05202

import triton
import triton.language as tl


@triton.jit
def fa_geglu_erf_3861e4(
    gate_ptr, up_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    gate = tl.load(gate_ptr + index, mask=mask, other=0.0)
    up = tl.load(up_ptr + index, mask=mask, other=0.0)
    product = gate * 0.5 * (1.0 - tl.erf(gate * -0.7071067811865476))
    out = product * up

    tl.store(out_ptr + index, out, mask=mask)
