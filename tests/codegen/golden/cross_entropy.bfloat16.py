# cross_entropy: the loss of each row of logits: log(sum(exp(x))) - x[target], the row read once
#
# Moves each operand once: targets 8 B/row, logits 2 B/element, loss 2 B/row.
# Maths in float32, rounded once, at the store.
# INDEX: dtype of indices, tl.int64 where one may pass 32 bits; FULL: BLOCK_COLS divides cols; VECTORS: rows
# start at multiples of 16 elements.
# Origin: library kernel cross_entropy, variant builtin.
# Source: https://arxiv.org/abs/2410.10989

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def exp_16bit(x):
    # Of a difference from a maximum, for results that are rounded to 11 bits at most. tl.exp takes three instructions more for what
    # is below 2^-126, which is 0 here.
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def add_exp(highest, total, x, VECTORS: tl.constexpr):
    # Eight columns share a running maximum, so that the old sum is rescaled once for all of them.
    parts = in_eights(x, VECTORS)
    raised = maximum(highest, tl.reduce(parts, 2, maximum))
    return raised, total * exp_16bit(highest - raised) + tl.sum(exp_16bit(parts - raised[:, :, None]), axis=2)


@triton.jit
def checked(place, extent, wanted):
    # Whether a position lies in its tensor. One that does not stops the kernel, as it stops torch's: where nothing is wanted,
    # past the end for instance, no position counts. The launch asks for assertions (debug=True).
    is_inside = (place >= 0) & (place < extent)
    tl.device_assert(is_inside | (wanted == 0), "position out of range")
    return is_inside & (wanted != 0)


@triton.jit
def in_eights(x, VECTORS: tl.constexpr):
    # A tile's columns, eight by eight, each eight in one thread: neighbours where threads read vectors, columns an eighth of the
    # tile apart where they read single elements. Nothing is moved.
    if VECTORS:
        return tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8])
    else:
        return tl.permute(tl.reshape(x, [x.shape[0], 8, x.shape[1] // 8]), [0, 2, 1])


@triton.jit
def maximum(a, b):
    # tl.max would drop a NaN.
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def merge_exp_sums(highest, total):
    # A lane that saw only -inf still has its start and a sum of 0; a row of such lanes has the maximum -inf.
    row_highest = tl.reduce(highest, 1, maximum, keep_dims=True)
    total = tl.sum(total * exp_16bit(highest - row_highest), axis=1, keep_dims=True)
    return tl.where(total == 0.0, float("-inf"), row_highest), total


@triton.jit
def to_float32(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

# ---- kernel ----


@triton.jit
def fa_cross_entropy_f0330b(
    targets_ptr, logits_ptr, loss_ptr,
    rows, cols, logits_stride0, logits_extent, logits_stride0_2,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr, VECTORS: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_mask = row < rows
    targets = tl.load(targets_ptr + row, mask=row_mask, other=0)
    is_eq = targets == -100
    logits_in_bounds = checked(targets, logits_extent, row_mask & (~is_eq))
    logits_2 = to_float32(tl.load(logits_ptr + targets + row * logits_stride0_2, mask=row_mask & logits_in_bounds, other=0.0))

    logits_max_tile = tl.full([BLOCK_ROWS, BLOCK_COLS // 8], -3.4028234663852886e38, tl.float32)
    exp_logits_shifted_sum_tile = tl.full([BLOCK_ROWS, BLOCK_COLS // 8], 0.0, tl.float32)
    for start in range(0, cols, BLOCK_COLS):
        col = (start + tl.arange(0, BLOCK_COLS)[None, :]).to(INDEX)
        col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
        mask = row_mask & col_mask
        logits = to_float32(tl.load(logits_ptr + row * logits_stride0 + col, mask=mask, other=0.0))
        logits_max_tile, exp_logits_shifted_sum_tile = add_exp(
            logits_max_tile, exp_logits_shifted_sum_tile, tl.where(col_mask, logits, float("-inf")), VECTORS
        )
    logits_max, exp_logits_shifted_sum = merge_exp_sums(logits_max_tile, exp_logits_shifted_sum_tile)
    exp_logits_shifted_sum = tl.where(logits_max == float("-inf"), float("nan"), exp_logits_shifted_sum)
    difference = tl.log(exp_logits_shifted_sum) - (logits_2 - logits_max)
    loss = tl.where(is_eq, 0.0, difference)

    tl.store(loss_ptr + row, loss, mask=row_mask)
