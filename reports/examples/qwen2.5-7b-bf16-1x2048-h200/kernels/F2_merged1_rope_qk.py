# rope_qk: mul -> neg -> cat -> mul -> add -> mul -> neg -> cat -> mul -> add in one kernel
#
# Moves each operand once: q_k 2 B/element, cos 2 B/element, sin 2 B/element, q_out 2 B/element, k_out
# 2 B/element.
# Maths in float32, rounded once, at the store.
# Tuning: block_rows=16 num_warps=4
# Origin: library kernel rope_qk, variant rotate_half.
# Source: https://arxiv.org/abs/2104.09864

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
def part1(
    program,
    q_k_ptr, cos_ptr, sin_ptr, q_out_ptr,
    rows: tl.constexpr, cols: tl.constexpr, q_k_stride0: tl.constexpr, q_k_stride1: tl.constexpr,
    q_k_offset: tl.constexpr, cos_stride0: tl.constexpr, cos_offset: tl.constexpr, sin_stride0: tl.constexpr,
    sin_offset: tl.constexpr, q_out_stride0: tl.constexpr, q_out_stride1: tl.constexpr, q_out_offset: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = program
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles % row_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    i0 = (tile // col_tiles // row_tiles).to(INDEX)
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask
    q_k_row = q_k_ptr + i0 * q_k_stride0 + row * q_k_stride1
    q_out_row = q_out_ptr + i0 * q_out_stride0 + row * q_out_stride1

    q_k = to_float32(tl.load(q_k_row + col, mask=mask, other=0.0))
    q_k_shifted = to_float32(tl.load(q_k_row + col + q_k_offset, mask=mask, other=0.0))
    cos = to_float32(tl.load(cos_ptr + i0 * cos_stride0 + col, mask=col_mask, other=0.0))
    cos_shifted = to_float32(tl.load(cos_ptr + i0 * cos_stride0 + col + cos_offset, mask=col_mask, other=0.0))
    sin = to_float32(tl.load(sin_ptr + i0 * sin_stride0 + col, mask=col_mask, other=0.0))
    sin_shifted = to_float32(tl.load(sin_ptr + i0 * sin_stride0 + col + sin_offset, mask=col_mask, other=0.0))
    q_out = q_k * cos + q_k_shifted * -1.0 * sin
    q_out_2 = q_k_shifted * cos_shifted + q_k * sin_shifted

    tl.store(q_out_row + col, q_out, mask=mask)
    tl.store(q_out_row + col + q_out_offset, q_out_2, mask=mask)


@triton.jit
def part2(
    program,
    q_k_ptr, cos_ptr, sin_ptr, k_out_ptr,
    rows: tl.constexpr, cols: tl.constexpr, q_k_stride0: tl.constexpr, q_k_stride1: tl.constexpr,
    q_k_offset: tl.constexpr, q_k_offset_2: tl.constexpr, cos_stride0: tl.constexpr, cos_offset: tl.constexpr,
    sin_stride0: tl.constexpr, sin_offset: tl.constexpr, k_out_stride0: tl.constexpr, k_out_stride1: tl.constexpr,
    k_out_offset: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = program
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles % row_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    i0 = (tile // col_tiles // row_tiles).to(INDEX)
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask
    q_k_row = q_k_ptr + i0 * q_k_stride0 + row * q_k_stride1
    k_out_row = k_out_ptr + i0 * k_out_stride0 + row * k_out_stride1

    q_k_shifted = to_float32(tl.load(q_k_row + col + q_k_offset, mask=mask, other=0.0))
    q_k_shifted_2 = to_float32(tl.load(q_k_row + col + q_k_offset_2, mask=mask, other=0.0))
    cos = to_float32(tl.load(cos_ptr + i0 * cos_stride0 + col, mask=col_mask, other=0.0))
    cos_shifted = to_float32(tl.load(cos_ptr + i0 * cos_stride0 + col + cos_offset, mask=col_mask, other=0.0))
    sin = to_float32(tl.load(sin_ptr + i0 * sin_stride0 + col, mask=col_mask, other=0.0))
    sin_shifted = to_float32(tl.load(sin_ptr + i0 * sin_stride0 + col + sin_offset, mask=col_mask, other=0.0))
    k_out = q_k_shifted * cos + q_k_shifted_2 * -1.0 * sin
    k_out_2 = q_k_shifted_2 * cos_shifted + q_k_shifted * sin_shifted

    tl.store(k_out_row + col, k_out, mask=mask)
    tl.store(k_out_row + col + k_out_offset, k_out_2, mask=mask)


@triton.jit
def fa_rope_qk_055697(
    q_k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    start_of_2, rows_of_1: tl.constexpr, cols_of_1: tl.constexpr, q_k_stride0_of_1: tl.constexpr,
    q_k_stride1_of_1: tl.constexpr, q_k_offset_of_1: tl.constexpr, cos_stride0_of_1: tl.constexpr,
    cos_offset_of_1: tl.constexpr, sin_stride0_of_1: tl.constexpr, sin_offset_of_1: tl.constexpr,
    q_out_stride0_of_1: tl.constexpr, q_out_stride1_of_1: tl.constexpr, q_out_offset_of_1: tl.constexpr,
    rows_of_2: tl.constexpr, cols_of_2: tl.constexpr, q_k_stride0_of_2: tl.constexpr,
    q_k_stride1_of_2: tl.constexpr, q_k_offset_of_2: tl.constexpr, q_k_offset_2_of_2: tl.constexpr,
    cos_stride0_of_2: tl.constexpr, cos_offset_of_2: tl.constexpr, sin_stride0_of_2: tl.constexpr,
    sin_offset_of_2: tl.constexpr, k_out_stride0_of_2: tl.constexpr, k_out_stride1_of_2: tl.constexpr,
    k_out_offset_of_2: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < start_of_2:
        part1(
            program,
            q_k_ptr, cos_ptr, sin_ptr, q_out_ptr,
            rows_of_1, cols_of_1, q_k_stride0_of_1, q_k_stride1_of_1, q_k_offset_of_1, cos_stride0_of_1, cos_offset_of_1,
            sin_stride0_of_1, sin_offset_of_1, q_out_stride0_of_1, q_out_stride1_of_1, q_out_offset_of_1,
            INDEX, BLOCK_ROWS, BLOCK_COLS,
        )
    else:
        part2(
            program - start_of_2,
            q_k_ptr, cos_ptr, sin_ptr, k_out_ptr,
            rows_of_2, cols_of_2, q_k_stride0_of_2, q_k_stride1_of_2, q_k_offset_of_2, q_k_offset_2_of_2,
            cos_stride0_of_2, cos_offset_of_2, sin_stride0_of_2, sin_offset_of_2, k_out_stride0_of_2, k_out_stride1_of_2,
            k_out_offset_of_2,
            INDEX, BLOCK_ROWS, BLOCK_COLS,
        )


# ---- launch, reference and check: python fa_rope_qk_055697.py ----

import torch


def launch(
    q_k, cos, sin, q_out, k_out,
    *,
    start_of_2=4096, rows_of_1=28, cols_of_1=64, q_k_stride0_of_1=4608, q_k_stride1_of_1=128, q_k_offset_of_1=64,
    cos_stride0_of_1=128, cos_offset_of_1=64, sin_stride0_of_1=128, sin_offset_of_1=64, q_out_stride0_of_1=3584,
    q_out_stride1_of_1=128, q_out_offset_of_1=64, rows_of_2=4, cols_of_2=64, q_k_stride0_of_2=4608,
    q_k_stride1_of_2=128, q_k_offset_of_2=3584, q_k_offset_2_of_2=3648, cos_stride0_of_2=128, cos_offset_of_2=64,
    sin_stride0_of_2=128, sin_offset_of_2=64, k_out_stride0_of_2=512, k_out_stride1_of_2=128, k_out_offset_of_2=64,
):
    """Launch on the current stream; the outputs are written in place. Defaults are the sizes, in elements, of the kernel's site."""
    BLOCK_ROWS = 16
    BLOCK_COLS = 64
    grid = (6144,)
    fa_rope_qk_055697[grid](
        q_k, cos, sin, q_out, k_out, start_of_2, rows_of_1, cols_of_1, q_k_stride0_of_1, q_k_stride1_of_1,
        q_k_offset_of_1, cos_stride0_of_1, cos_offset_of_1, sin_stride0_of_1, sin_offset_of_1, q_out_stride0_of_1,
        q_out_stride1_of_1, q_out_offset_of_1, rows_of_2, cols_of_2, q_k_stride0_of_2, q_k_stride1_of_2,
        q_k_offset_of_2, q_k_offset_2_of_2, cos_stride0_of_2, cos_offset_of_2, sin_stride0_of_2, sin_offset_of_2,
        k_out_stride0_of_2, k_out_stride1_of_2, k_out_offset_of_2,
        INDEX=tl.int32, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS,
        num_warps=4, enable_fp_fusion=True,
    )


def make_inputs(device):
    """Seeded inputs and zeroed outputs, laid out as at the kernel's site."""
    generator = torch.Generator().manual_seed(0)

    def normal(shape, strides, dtype):
        tensor = torch.empty_strided(shape, strides, dtype=dtype)
        return tensor.copy_(torch.randn(shape, generator=generator)).to(device)

    def whole(shape, strides, dtype, below):
        tensor = torch.empty_strided(shape, strides, dtype=dtype)
        return tensor.copy_(torch.randint(0, below, shape, generator=generator)).to(device)

    return (
        normal((1, 2048, 4608), (9437184, 4608, 1), torch.bfloat16),  # q_k
        normal((1, 2048, 128), (262144, 128, 1), torch.bfloat16),  # cos
        normal((1, 2048, 128), (262144, 128, 1), torch.bfloat16),  # sin
        torch.empty_strided((1, 28, 2048, 128), (7340032, 128, 3584, 1), dtype=torch.bfloat16, device=device).zero_(),  # q_out
        torch.empty_strided((1, 4, 2048, 128), (1048576, 128, 512, 1), dtype=torch.bfloat16, device=device).zero_(),  # k_out
    )


def reference(q_k, cos, sin, q_out, k_out, *, dtype):
    """The same op by op, computed in dtype; the outputs are written in place."""
    device = q_k.device

    def at(tensor, shape, strides, offset=0):
        # A view of a tensor's memory.
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

    q_k_value = at(q_k, (2048, 28, 64), (4608, 128, 1)).to(dtype)
    q_k_value_2 = at(q_k, (2048, 28, 64), (4608, 128, 1), 64).to(dtype)
    cos_value = at(cos, (2048, 1, 64), (128, 0, 1)).to(dtype)
    cos_value_2 = at(cos, (2048, 1, 64), (128, 0, 1), 64).to(dtype)
    sin_value = at(sin, (2048, 1, 64), (128, 0, 1)).to(dtype)
    sin_value_2 = at(sin, (2048, 1, 64), (128, 0, 1), 64).to(dtype)
    at(q_out, (2048, 28, 64), (3584, 128, 1)).copy_((q_k_value * cos_value) + ((-q_k_value_2) * sin_value))
    at(q_out, (2048, 28, 64), (3584, 128, 1), 64).copy_((q_k_value_2 * cos_value_2) + (q_k_value * sin_value_2))
    q_k_value_3 = at(q_k, (2048, 4, 64), (4608, 128, 1), 3584).to(dtype)
    q_k_value_4 = at(q_k, (2048, 4, 64), (4608, 128, 1), 3648).to(dtype)
    cos_value_3 = at(cos, (2048, 1, 64), (128, 0, 1)).to(dtype)
    cos_value_4 = at(cos, (2048, 1, 64), (128, 0, 1), 64).to(dtype)
    sin_value_3 = at(sin, (2048, 1, 64), (128, 0, 1)).to(dtype)
    sin_value_4 = at(sin, (2048, 1, 64), (128, 0, 1), 64).to(dtype)
    at(k_out, (2048, 4, 64), (512, 128, 1)).copy_((q_k_value_3 * cos_value_3) + ((-q_k_value_4) * sin_value_3))
    at(k_out, (2048, 4, 64), (512, 128, 1), 64).copy_((q_k_value_4 * cos_value_4) + (q_k_value_3 * sin_value_4))


def main():
    """Check the kernel against float64 and print how fast it moves its bytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = make_inputs(device)
    inputs, outputs = tensors[:3], tensors[3:]
    truth = [torch.zeros_like(o, dtype=torch.float64 if o.is_floating_point() else o.dtype) for o in outputs]
    own = [torch.zeros_like(o, dtype=torch.float32 if o.is_floating_point() else o.dtype) for o in outputs]
    reference(*inputs, *truth, dtype=torch.float64)
    reference(*inputs, *own, dtype=torch.float32)
    launch(*tensors)
    is_right = True
    for name, found, right, plain in zip(('q_out', 'k_out'), outputs, truth, own, strict=True):
        # An op-by-op computation in float32, rounded once, has this error; the kernel may have half as much again.
        limit = 1.5 * relative_error(plain.to(found.dtype), right) + 5e-07
        if device == "cpu" and found.dtype == torch.bfloat16:
            limit *= 3  # Triton's interpreter cuts a bfloat16 off where a GPU rounds it
        error = relative_error(found, right)
        is_right &= error <= limit
        print(f"{name}: relative error {error:.2e}, limit {limit:.2e}: {'ok' if error <= limit else 'WRONG'}")
    if device == "cpu":
        print("interpreted, not timed: no GB/s")
    else:
        import triton.testing

        milliseconds = triton.testing.do_bench(lambda: launch(*tensors), return_mode="median")
        print(f"fa_rope_qk_055697: {milliseconds * 1e3:.2f} us, {34603008 / milliseconds / 1e6:.1f} GB/s, cold L2 cache")
    return 0 if is_right else 1


def relative_error(found, right):
    """The norm of the difference over the norm of the truth; infinite where one of them alone is not finite."""
    found, right = found.double(), right.double()
    same = (found == right) | (found.isnan() & right.isnan())
    difference = torch.where(same, 0.0, found - right)
    scale = torch.where(right.isfinite(), right, 0.0).norm()
    return (difference.norm() / scale).nan_to_num(nan=float("inf") if difference.any() else 0.0).item()


if __name__ == "__main__":
    raise SystemExit(main())
