# reglu: relu(gate) * up, in one pass
#
# Moves each operand once: gate 2 B/element, up 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel reglu, variant builtin.
# Source: https://arxiv.org/abs/2002.05202

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
def fa_reglu_7c6e97(
    gate_ptr, up_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    gate = to_float32(tl.load(gate_ptr + index, mask=mask, other=0.0))
    up = to_float32(tl.load(up_ptr + index, mask=mask, other=0.0))
    maximum_gate = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
    out = maximum_gate * up

    tl.store(out_ptr + index, out, mask=mask)
