# embedding_scale: token rows looked up and scaled, as Gemma begins
#
# Moves each operand once: ids 8 B/row, weight 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits.
# Origin: library kernel embedding_scale, variant scaled.
# Source: https://arxiv.org/abs/2403.08295

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def checked(place, extent, wanted):
    # Whether a position lies in its tensor. One that does not stops the kernel, as it stops torch's: where nothing is wanted,
    # past the end for instance, no position counts. The launch asks for assertions (debug=True).
    is_inside = (place >= 0) & (place < extent)
    tl.device_assert(is_inside | (wanted == 0), "position out of range")
    return is_inside & (wanted != 0)


@triton.jit
def to_float32(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

# ---- kernel ----


@triton.jit
def fa_embedding_scale_da64fa(
    ids_ptr, weight_ptr, out_ptr,
    rows, cols: tl.constexpr, weight_extent: tl.constexpr, weight_step0: tl.constexpr, out_stride0: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = tl.program_id(0)
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask

    ids = tl.load(ids_ptr + row, mask=row_mask, other=0)
    weight_in_bounds = checked(ids, weight_extent, row_mask)
    weight = to_float32(tl.load(weight_ptr + ids * weight_step0 + col, mask=mask & weight_in_bounds, other=0.0))
    scale = 55.42562584220407
    out = weight * scale

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)
