# permuted_copy: permuted dims, contiguous
#
# Moves each operand once: permuted 2 B/element, plain 2 B/element.
# Maths in float32, rounded once, at the store.
# Tuning: block_rows=128 num_warps=8
# Origin: generated for what a GEMM over patches reads and gives.

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
def fa_permuted_copy_54525b(
    permuted_ptr, plain_ptr,
    rows: tl.constexpr, cols: tl.constexpr, permuted_stride0: tl.constexpr, permuted_stride2: tl.constexpr,
    plain_stride0: tl.constexpr, plain_stride1: tl.constexpr,
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
    permuted_row = permuted_ptr + i0 * permuted_stride0 + row
    plain_row = plain_ptr + i0 * plain_stride0 + row * plain_stride1

    permuted = to_float32(tl.load(permuted_row + col * permuted_stride2, mask=mask, other=0.0))

    tl.store(plain_row + col, permuted, mask=mask)


# ---- launch, reference and check: python fa_permuted_copy_54525b.py ----

import torch


def launch(
    permuted, plain,
    *,
    rows=96, cols=3136, permuted_stride0=301056, permuted_stride2=96, plain_stride0=301056, plain_stride1=3136,
):
    """Launch on the current stream; the outputs are written in place. Defaults are the sizes, in elements, of the kernel's site."""
    BLOCK_ROWS = 128
    BLOCK_COLS = 32
    grid = (32 * triton.cdiv(rows, BLOCK_ROWS) * triton.cdiv(cols, BLOCK_COLS),)
    fa_permuted_copy_54525b[grid](
        permuted, plain, rows, cols, permuted_stride0, permuted_stride2, plain_stride0, plain_stride1,
        INDEX=tl.int32, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS,
        num_warps=8, enable_fp_fusion=True,
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
        normal((9633792,), (1,), torch.bfloat16),  # permuted
        torch.empty_strided((9633792,), (1,), dtype=torch.bfloat16, device=device).zero_(),  # plain
    )


def reference(permuted, plain, *, dtype):
    """The same op by op, computed in dtype; the outputs are written in place."""
    device = permuted.device

    def at(tensor, shape, strides, offset=0):
        # A view of a tensor's memory.
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

    permuted_value = at(permuted, (32, 96, 3136), (301056, 1, 96)).to(dtype)
    at(plain, (32, 96, 3136), (301056, 3136, 1)).copy_(permuted_value)


def main():
    """Check the kernel against float64 and print how fast it moves its bytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = make_inputs(device)
    inputs, outputs = tensors[:1], tensors[1:]
    truth = [torch.zeros_like(o, dtype=torch.float64 if o.is_floating_point() else o.dtype) for o in outputs]
    own = [torch.zeros_like(o, dtype=torch.float32 if o.is_floating_point() else o.dtype) for o in outputs]
    reference(*inputs, *truth, dtype=torch.float64)
    reference(*inputs, *own, dtype=torch.float32)
    launch(*tensors)
    is_right = True
    for name, found, right, plain in zip(('plain',), outputs, truth, own, strict=True):
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
        print(f"fa_permuted_copy_54525b: {milliseconds * 1e3:.2f} us, {38535168 / milliseconds / 1e6:.1f} GB/s, cold L2 cache")
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
