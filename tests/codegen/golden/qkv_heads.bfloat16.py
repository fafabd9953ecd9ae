# qkv_heads: bias add, split into query, key and value, and heads before the sequence, in one pass over the
# packed projection
#
# Moves each operand once: packed 2 B/element; bias 2 B/element, the same for every row; query 2 B/element; key
# 2 B/element; value 2 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel qkv_heads, variant split.
# Source: https://github.com/NVIDIA/FasterTransformer/blob/main/docs/bert_guide.md

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
def fa_qkv_heads_de133c(
    packed_ptr, bias_ptr, query_ptr, key_ptr, value_ptr,
    rows: tl.constexpr, cols: tl.constexpr, packed_stride0: tl.constexpr, packed_stride1: tl.constexpr,
    bias_stride0: tl.constexpr, packed_offset: tl.constexpr, bias_offset: tl.constexpr,
    packed_offset_2: tl.constexpr, bias_offset_2: tl.constexpr, query_stride0: tl.constexpr,
    query_stride1: tl.constexpr, key_stride0: tl.constexpr, key_stride1: tl.constexpr,
    value_stride0: tl.constexpr, value_stride1: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = tl.program_id(0)
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles % row_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    i0 = (tile // col_tiles // row_tiles).to(INDEX)
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask
    shared_col = col + 0 * row if BLOCK_COLS >= 128 and BLOCK_COLS < 1024 else col  # laid out as rows are
    packed_row = packed_ptr + i0 * packed_stride0 + row * packed_stride1
    query_row = query_ptr + i0 * query_stride0 + row * query_stride1
    key_row = key_ptr + i0 * key_stride0 + row * key_stride1
    value_row = value_ptr + i0 * value_stride0 + row * value_stride1

    packed = to_float32(tl.load(packed_row + col, mask=mask, other=0.0))
    bias = to_float32(tl.load(bias_ptr + i0 * bias_stride0 + shared_col, mask=col_mask, other=0.0))
    packed_shifted = to_float32(tl.load(packed_row + col + packed_offset, mask=mask, other=0.0))
    bias_shifted = to_float32(tl.load(bias_ptr + i0 * bias_stride0 + shared_col + bias_offset, mask=col_mask, other=0.0))
    packed_shifted_2 = to_float32(tl.load(packed_row + col + packed_offset_2, mask=mask, other=0.0))
    bias_shifted_2 = to_float32(tl.load(bias_ptr + i0 * bias_stride0 + shared_col + bias_offset_2, mask=col_mask, other=0.0))
    query = packed + bias
    key = packed_shifted + bias_shifted
    value = packed_shifted_2 + bias_shifted_2

    tl.store(query_row + col, query, mask=mask)
    tl.store(key_row + col, key, mask=mask)
    tl.store(value_row + col, value, mask=mask)
