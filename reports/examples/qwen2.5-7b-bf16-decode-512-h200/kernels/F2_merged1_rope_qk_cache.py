# rope_qk_cache: mul -> neg -> cat -> mul -> add -> mul -> neg -> cat -> mul -> add -> index_copy -> index_copy
# in one kernel
#
# Moves each operand once: q_k_v 2 B/element, cos 2 B/column, sin 2 B/column, q_out 2 B/element, position 8 B in
# all, k_cache 2 B/element, v_cache 2 B/element.
# Maths in float32, rounded once, at the store.
# Tuning: block_rows=4 num_warps=4
# Origin: library kernel rope_qk_cache, variant rotate_half.
# Source: https://arxiv.org/abs/2104.09864

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
def part1(
    program,
    q_k_v_ptr, cos_ptr, sin_ptr, q_out_ptr,
    rows, cols: tl.constexpr, q_k_v_stride0: tl.constexpr, q_k_v_offset: tl.constexpr, cos_offset: tl.constexpr,
    sin_offset: tl.constexpr, q_out_stride0: tl.constexpr, q_out_offset: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = program
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask

    q_k_v = to_float32(tl.load(q_k_v_ptr + row * q_k_v_stride0 + col, mask=mask, other=0.0))
    q_k_v_shifted = to_float32(tl.load(q_k_v_ptr + row * q_k_v_stride0 + col + q_k_v_offset, mask=mask, other=0.0))
    cos = to_float32(tl.load(cos_ptr + col, mask=col_mask, other=0.0))
    cos_shifted = to_float32(tl.load(cos_ptr + col + cos_offset, mask=col_mask, other=0.0))
    sin = to_float32(tl.load(sin_ptr + col, mask=col_mask, other=0.0))
    sin_shifted = to_float32(tl.load(sin_ptr + col + sin_offset, mask=col_mask, other=0.0))
    q_out = q_k_v * cos + q_k_v_shifted * -1.0 * sin
    q_out_2 = q_k_v_shifted * cos_shifted + q_k_v * sin_shifted

    tl.store(q_out_ptr + row * q_out_stride0 + col, q_out, mask=mask)
    tl.store(q_out_ptr + row * q_out_stride0 + col + q_out_offset, q_out_2, mask=mask)


@triton.jit
def part2(
    program,
    position_ptr, q_k_v_ptr, cos_ptr, sin_ptr, k_cache_ptr, v_cache_ptr,
    rows, cols: tl.constexpr, k_cache_extent: tl.constexpr, q_k_v_stride0: tl.constexpr,
    q_k_v_offset: tl.constexpr, q_k_v_offset_2: tl.constexpr, cos_offset: tl.constexpr, sin_offset: tl.constexpr,
    q_k_v_offset_3: tl.constexpr, q_k_v_offset_4: tl.constexpr, k_cache_stride0: tl.constexpr,
    k_cache_step0: tl.constexpr, k_cache_offset: tl.constexpr, v_cache_stride0: tl.constexpr,
    v_cache_step0: tl.constexpr, v_cache_offset: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = program
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask

    position = tl.load(position_ptr)
    q_k_v_shifted = to_float32(tl.load(q_k_v_ptr + row * q_k_v_stride0 + col + q_k_v_offset, mask=mask, other=0.0))
    q_k_v_shifted_2 = to_float32(tl.load(q_k_v_ptr + row * q_k_v_stride0 + col + q_k_v_offset_2, mask=mask, other=0.0))
    cos = to_float32(tl.load(cos_ptr + col, mask=col_mask, other=0.0))
    cos_shifted = to_float32(tl.load(cos_ptr + col + cos_offset, mask=col_mask, other=0.0))
    sin = to_float32(tl.load(sin_ptr + col, mask=col_mask, other=0.0))
    sin_shifted = to_float32(tl.load(sin_ptr + col + sin_offset, mask=col_mask, other=0.0))
    q_k_v_shifted_3 = to_float32(tl.load(q_k_v_ptr + row * q_k_v_stride0 + col + q_k_v_offset_3, mask=mask, other=0.0))
    q_k_v_shifted_4 = to_float32(tl.load(q_k_v_ptr + row * q_k_v_stride0 + col + q_k_v_offset_4, mask=mask, other=0.0))
    fits_k_cache = checked(position, k_cache_extent, True)
    k_cache = q_k_v_shifted * cos + q_k_v_shifted_2 * -1.0 * sin
    k_cache_2 = q_k_v_shifted_2 * cos_shifted + q_k_v_shifted * sin_shifted

    store_mask = tl.where(fits_k_cache, mask, False)
    tl.store(k_cache_ptr + position * k_cache_step0 + row * k_cache_stride0 + col, k_cache, mask=store_mask)
    tl.store(k_cache_ptr + position * k_cache_step0 + row * k_cache_stride0 + col + k_cache_offset, k_cache_2, mask=store_mask)
    tl.store(v_cache_ptr + position * v_cache_step0 + row * v_cache_stride0 + col, q_k_v_shifted_3, mask=store_mask)
    tl.store(
        v_cache_ptr + position * v_cache_step0 + row * v_cache_stride0 + col + v_cache_offset, q_k_v_shifted_4, mask=store_mask
    )


@triton.jit
def fa_rope_qk_cache_86951e(
    q_k_v_ptr, cos_ptr, sin_ptr, position_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr,
    start_of_2, rows_of_1, cols_of_1: tl.constexpr, q_k_v_stride0_of_1: tl.constexpr,
    q_k_v_offset_of_1: tl.constexpr, cos_offset_of_1: tl.constexpr, sin_offset_of_1: tl.constexpr,
    q_out_stride0_of_1: tl.constexpr, q_out_offset_of_1: tl.constexpr, rows_of_2, cols_of_2: tl.constexpr,
    k_cache_extent_of_2: tl.constexpr, q_k_v_stride0_of_2: tl.constexpr, q_k_v_offset_of_2: tl.constexpr,
    q_k_v_offset_2_of_2: tl.constexpr, cos_offset_of_2: tl.constexpr, sin_offset_of_2: tl.constexpr,
    q_k_v_offset_3_of_2: tl.constexpr, q_k_v_offset_4_of_2: tl.constexpr, k_cache_stride0_of_2: tl.constexpr,
    k_cache_step0_of_2: tl.constexpr, k_cache_offset_of_2: tl.constexpr, v_cache_stride0_of_2: tl.constexpr,
    v_cache_step0_of_2: tl.constexpr, v_cache_offset_of_2: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < start_of_2:
        part1(
            program,
            q_k_v_ptr, cos_ptr, sin_ptr, q_out_ptr,
            rows_of_1, cols_of_1, q_k_v_stride0_of_1, q_k_v_offset_of_1, cos_offset_of_1, sin_offset_of_1,
            q_out_stride0_of_1, q_out_offset_of_1,
            INDEX, BLOCK_ROWS, BLOCK_COLS,
        )
    else:
        part2(
            program - start_of_2,
            position_ptr, q_k_v_ptr, cos_ptr, sin_ptr, k_cache_ptr, v_cache_ptr,
            rows_of_2, cols_of_2, k_cache_extent_of_2, q_k_v_stride0_of_2, q_k_v_offset_of_2, q_k_v_offset_2_of_2,
            cos_offset_of_2, sin_offset_of_2, q_k_v_offset_3_of_2, q_k_v_offset_4_of_2, k_cache_stride0_of_2,
            k_cache_step0_of_2, k_cache_offset_of_2, v_cache_stride0_of_2, v_cache_step0_of_2, v_cache_offset_of_2,
            INDEX, BLOCK_ROWS, BLOCK_COLS,
        )


# ---- launch, reference and check: python fa_rope_qk_cache_86951e.py ----

import torch


def launch(
    q_k_v, cos, sin, position, q_out, k_cache, v_cache,
    *,
    start_of_2=7, rows_of_1=28, cols_of_1=64, q_k_v_stride0_of_1=128, q_k_v_offset_of_1=64, cos_offset_of_1=64,
    sin_offset_of_1=64, q_out_stride0_of_1=128, q_out_offset_of_1=64, rows_of_2=4, cols_of_2=64,
    k_cache_extent_of_2=576, q_k_v_stride0_of_2=128, q_k_v_offset_of_2=3584, q_k_v_offset_2_of_2=3648,
    cos_offset_of_2=64, sin_offset_of_2=64, q_k_v_offset_3_of_2=4096, q_k_v_offset_4_of_2=4160,
    k_cache_stride0_of_2=73728, k_cache_step0_of_2=128, k_cache_offset_of_2=64, v_cache_stride0_of_2=73728,
    v_cache_step0_of_2=128, v_cache_offset_of_2=64,
):
    """Launch on the current stream; the outputs are written in place. Defaults are the sizes, in elements, of the kernel's site."""
    BLOCK_ROWS = 4
    BLOCK_COLS = 64
    grid = (8,)
    fa_rope_qk_cache_86951e[grid](
        q_k_v, cos, sin, position, q_out, k_cache, v_cache, start_of_2, rows_of_1, cols_of_1, q_k_v_stride0_of_1,
        q_k_v_offset_of_1, cos_offset_of_1, sin_offset_of_1, q_out_stride0_of_1, q_out_offset_of_1, rows_of_2,
        cols_of_2, k_cache_extent_of_2, q_k_v_stride0_of_2, q_k_v_offset_of_2, q_k_v_offset_2_of_2, cos_offset_of_2,
        sin_offset_of_2, q_k_v_offset_3_of_2, q_k_v_offset_4_of_2, k_cache_stride0_of_2, k_cache_step0_of_2,
        k_cache_offset_of_2, v_cache_stride0_of_2, v_cache_step0_of_2, v_cache_offset_of_2,
        INDEX=tl.int32, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS,
        num_warps=4, enable_fp_fusion=True, debug=True, sanitize_overflow=False,
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
        normal((1, 1, 4608), (4608, 4608, 1), torch.bfloat16),  # q_k_v
        normal((1, 1, 128), (128, 128, 1), torch.bfloat16),  # cos
        normal((1, 1, 128), (128, 128, 1), torch.bfloat16),  # sin
        whole((1,), (1,), torch.int64, 576),  # position
        torch.empty_strided((1, 28, 1, 128), (3584, 128, 128, 1), dtype=torch.bfloat16, device=device).zero_(),  # q_out
        torch.empty_strided((294912,), (1,), dtype=torch.bfloat16, device=device).zero_(),  # k_cache
        torch.empty_strided((294912,), (1,), dtype=torch.bfloat16, device=device).zero_(),  # v_cache
    )


def reference(q_k_v, cos, sin, position, q_out, k_cache, v_cache, *, dtype):
    """The same op by op, computed in dtype; the outputs are written in place."""
    device = q_k_v.device

    def number(shape, device):
        # The loop variable of the one dim that is not 1.
        return torch.arange(max(shape), device=device).reshape(shape)

    def at(tensor, shape, strides, offset=0):
        # A view of a tensor's memory.
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

    def put(tensor, shape, address, value, wanted):
        # Write by address; nothing where it is not wanted.
        wanted = torch.as_tensor(wanted, device=device).expand(shape)
        memory = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset(),), (1,))
        memory[torch.as_tensor(address, device=device).expand(shape)[wanted]] = value.expand(shape)[wanted].to(tensor.dtype)

    q_k_v_value = at(q_k_v, (28, 64), (128, 1)).to(dtype)
    q_k_v_value_2 = at(q_k_v, (28, 64), (128, 1), 64).to(dtype)
    cos_value = at(cos, (1, 64), (0, 1)).to(dtype)
    cos_value_2 = at(cos, (1, 64), (0, 1), 64).to(dtype)
    sin_value = at(sin, (1, 64), (0, 1)).to(dtype)
    sin_value_2 = at(sin, (1, 64), (0, 1), 64).to(dtype)
    at(q_out, (28, 64), (128, 1)).copy_((q_k_v_value * cos_value) + ((-q_k_v_value_2) * sin_value))
    at(q_out, (28, 64), (128, 1), 64).copy_((q_k_v_value_2 * cos_value_2) + (q_k_v_value * sin_value_2))
    position_value = at(position, (1, 1), (0, 0)).to(torch.int64)
    in_bounds = (position_value >= 0) & (position_value < 576)
    q_k_v_value_3 = at(q_k_v, (4, 64), (128, 1), 3584).to(dtype)
    q_k_v_value_4 = at(q_k_v, (4, 64), (128, 1), 3648).to(dtype)
    cos_value_3 = at(cos, (1, 64), (0, 1)).to(dtype)
    cos_value_4 = at(cos, (1, 64), (0, 1), 64).to(dtype)
    sin_value_3 = at(sin, (1, 64), (0, 1)).to(dtype)
    sin_value_4 = at(sin, (1, 64), (0, 1), 64).to(dtype)
    q_k_v_value_5 = at(q_k_v, (4, 64), (128, 1), 4096).to(dtype)
    q_k_v_value_6 = at(q_k_v, (4, 64), (128, 1), 4160).to(dtype)
    put(k_cache, (4, 64), number((4, 1), device) * 73728 + number((1, 64), device) + position_value * 128, ((q_k_v_value_3 * cos_value_3) + ((-q_k_v_value_4) * sin_value_3)), in_bounds)
    put(k_cache, (4, 64), 64 + number((4, 1), device) * 73728 + number((1, 64), device) + position_value * 128, ((q_k_v_value_4 * cos_value_4) + (q_k_v_value_3 * sin_value_4)), in_bounds)
    put(v_cache, (4, 64), number((4, 1), device) * 73728 + number((1, 64), device) + position_value * 128, q_k_v_value_5, in_bounds)
    put(v_cache, (4, 64), 64 + number((4, 1), device) * 73728 + number((1, 64), device) + position_value * 128, q_k_v_value_6, in_bounds)


def main():
    """Check the kernel against float64 and print how fast it moves its bytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = make_inputs(device)
    inputs, outputs = tensors[:4], tensors[4:]
    truth = [torch.zeros_like(o, dtype=torch.float64 if o.is_floating_point() else o.dtype) for o in outputs]
    own = [torch.zeros_like(o, dtype=torch.float32 if o.is_floating_point() else o.dtype) for o in outputs]
    reference(*inputs, *truth, dtype=torch.float64)
    reference(*inputs, *own, dtype=torch.float32)
    launch(*tensors)
    is_right = True
    for name, found, right, plain in zip(('q_out', 'k_cache', 'v_cache'), outputs, truth, own, strict=True):
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
        print(f"fa_rope_qk_cache_86951e: {milliseconds * 1e3:.2f} us, {18952 / milliseconds / 1e6:.1f} GB/s, cold L2 cache")
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
