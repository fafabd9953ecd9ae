# embedding_rmsnorm: embedding -> to -> pow -> mean -> add -> rsqrt -> mul -> to -> mul in one kernel
#
# Moves each operand once: ids 8 B in all, table 2 B/column, weight 2 B/column, rows 2 B/column, out 2 B/column.
# Maths in float32, rounded once, at the store.
# Origin: library kernel embedding_rmsnorm, variant llama.
# Source: https://arxiv.org/abs/1910.07467

import triton
import triton.language as tl


@triton.jit
def wide(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def fa_embedding_rmsnorm_961bbd(
    ids_ptr, table_ptr, weight_ptr, rows_ptr, out_ptr,
    rows, cols, table_extent, table_step0,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr,
):
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols

    ids = tl.load(ids_ptr)
    has_table = (ids >= 0) & (ids < table_extent)
    table = wide(tl.load(table_ptr + ids * table_step0 + col, mask=tl.where(has_table, col_mask, False), other=float("nan")))
    weight = wide(tl.load(weight_ptr + col, mask=col_mask, other=0.0))
    chosen_squared_sum = tl.sum(tl.where(col_mask, table * table, 0.0), axis=1, keep_dims=True)
    chosen_squared_mean = tl.div_rn(chosen_squared_sum, tl.cast(cols, tl.float32))
    eps = 1e-06
    inverse_rms = tl.rsqrt(chosen_squared_mean + eps)
    out = weight * (table * inverse_rms)

    tl.store(rows_ptr + col, table, mask=col_mask)
    tl.store(out_ptr + col, out, mask=col_mask)
