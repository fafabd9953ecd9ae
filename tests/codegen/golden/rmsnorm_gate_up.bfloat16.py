# rmsnorm_gate_up: RMSNorm, gate and up projections and silu(gate) * up in one, for the few rows of decoding
#
# Reads the weight (37888 x 3584 bfloat16, 271.6 MB) once, for 1 row of x.
# Sums in float32, rounded once, at the store.
# The norm's factor of a row is one for all its results: the squares are summed up along the way.
# Launch: triton_fma rows=2 warps=4 block_k=1024 stages=3
# Origin: library kernel rmsnorm_gate_up, variant llama.
# Source: https://arxiv.org/abs/2002.05202

import triton
import triton.language as tl


@triton.jit
def fa_rmsnorm_gate_up_af0ca3(
    x, norm_weight, weight, out,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = row < N
    value = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        col = start + tl.arange(0, BLOCK_K)
        col_mask = col < K
        weight_mask = row_mask[:, None] & col_mask[None, :]
        value_place = row[:, None] * K + col[None, :]
        value_tile = tl.load(weight + value_place, mask=weight_mask, other=0.0, eviction_policy="evict_first")
        up_place = (N + row)[:, None] * K + col[None, :]
        up_tile = tl.load(weight + up_place, mask=weight_mask, other=0.0, eviction_policy="evict_first")
        x_tile = tl.load(x + col, mask=col_mask, other=0.0)
        norm = tl.load(norm_weight + col, mask=col_mask, other=0.0).to(tl.float32)
        wide = x_tile.to(tl.float32)
        squares += wide * wide
        x_tile = wide * norm
        value += x_tile[None, :] * value_tile.to(tl.float32)
        up += x_tile[None, :] * up_tile.to(tl.float32)

    value = tl.sum(value, axis=1)
    up = tl.sum(up, axis=1)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / K + 1e-06)
    value *= scale
    up *= scale
    value *= up / (1.0 + tl.exp(-value))
    place = row
    mask = row_mask
    tl.store(out + place, value, mask=mask)
