# reglu_packed: reglu read from one packed gate/up tensor, in one pass
#
# Moves each operand once: packed 4 B/element, out 4 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel reglu_packed, variant chunk.
# Source: https://arxiv.org/abs/2002.05202

import triton
import triton.language as tl


@triton.jit
def fa_reglu_packed_b7f8c8(
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

    packed = tl.load(packed_ptr + row * packed_stride0 + col, mask=mask, other=0.0)
    packed_shifted = tl.load(packed_ptr + row * packed_stride0 + col + packed_offset, mask=mask, other=0.0)
    maximum_packed = tl.maximum(packed, 0.0, propagate_nan=tl.PropagateNan.ALL)
    out = maximum_packed * packed_shifted

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
