# linear_residual: a linear layer and the residual added to it, for the few rows of decoding
#
# Reads the weight (3584 x 3584 float32, 51.4 MB) once, for 1 row of x.
# Sums in float32, rounded once, at the store.
# Launch: triton_fma rows=2 warps=4 block_k=1024 stages=3
# Origin: library kernel linear_residual, variant written_out.
# Source: https://arxiv.org/abs/1706.03762

import triton
import triton.language as tl


@triton.jit
def fa_linear_residual_8e2fd3(
    x, weight, residual, out,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = row < N
    value = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        col = start + tl.arange(0, BLOCK_K)
        col_mask = col < K
        weight_mask = row_mask[:, None] & col_mask[None, :]
        value_place = row[:, None] * K + col[None, :]
        value_tile = tl.load(weight + value_place, mask=weight_mask, other=0.0, eviction_policy="evict_first")
        x_tile = tl.load(x + col, mask=col_mask, other=0.0)
        x_tile = x_tile.to(tl.float32)
        value += x_tile[None, :] * value_tile.to(tl.float32)

    value = tl.sum(value, axis=1)
    place = row
    mask = row_mask
    value += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, value, mask=mask)
