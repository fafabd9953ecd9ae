# reglu_packed: reglu read from one packed gate/up tensor, in one pass
#
# Moves each operand once: packed 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel reglu_packed, variant chunk.
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
def fa_reglu_packed_74d489(
    packed_ptr, out_ptr,
    rows, cols: tl.constexpr, packed_stride0: tl.constexpr, packed_offset: tl.constexpr, out_stride0: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = tl.program_id(0)
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask

    packed = to_float32(tl.load(packed_ptr + row * packed_stride0 + col, mask=mask, other=0.0))
    packed_shifted = to_float32(tl.load(packed_ptr + row * packed_stride0 + col + packed_offset, mask=mask, other=0.0))
    maximum_packed = tl.maximum(packed, 0.0, propagate_nan=tl.PropagateNan.ALL)
    out = maximum_packed * packed_shifted

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
