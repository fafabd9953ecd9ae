# reglu: relu(gate) * up, in one pass
#
# Moves each operand once: gate 4 B/element, up 4 B/element, out 4 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel reglu, variant builtin.
# Source: https://arxiv.org/abs/2002.05202

import triton
import triton.language as tl


@triton.jit
def fa_reglu_0f5926(
    gate_ptr, up_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    gate = tl.load(gate_ptr + index, mask=mask, other=0.0)
    up = tl.load(up_ptr + index, mask=mask, other=0.0)
    maximum_gate = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
    out = maximum_gate * up

    tl.store(out_ptr + index, out, mask=mask)
