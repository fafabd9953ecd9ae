# add_rmsnorm: add -> to -> pow -> mean -> add -> rsqrt -> mul -> to -> mul in one kernel
#
# Moves each operand once: weight 2 B/column, x 2 B/element, residual 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# Origin: library kernel add_rmsnorm, variant llama.
# Source: https://arxiv.org/abs/1910.07467

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def round_bf16(x):
    # Widened by a shift: after a conversion back ptxas rounds with F2F, which is slower than the F2FP that it takes here (sm_90).
    return (x.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_float32(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

# ---- kernel ----


@triton.jit
def fa_add_rmsnorm_3cb974(
    weight_ptr, x_ptr, residual_ptr, out_ptr,
    rows, cols, x_stride0, residual_stride0, out_stride0,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    row_mask = row < rows
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
    mask = row_mask & col_mask

    weight = to_float32(tl.load(weight_ptr + col, mask=col_mask, other=0.0))
    x = to_float32(tl.load(x_ptr + row * x_stride0 + col, mask=mask, other=0.0))
    residual = to_float32(tl.load(residual_ptr + row * residual_stride0 + col, mask=mask, other=0.0))
    total = x + residual
    total_squared_sum = tl.sum(total * total, axis=1, keep_dims=True)
    total_squared_mean = tl.div_rn(total_squared_sum, tl.cast(cols, tl.float32))
    eps = 1e-06
    inverse_rms = tl.rsqrt(total_squared_mean + eps)
    out = weight * round_bf16(total * inverse_rms)

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)


# ---- launch, reference and check: python fa_add_rmsnorm_3cb974.py ----

import torch


def launch(
    weight, x, residual, out,
    *,
    rows=128, cols=3584, x_stride0=3584, residual_stride0=3584, out_stride0=3584,
):
    """Launch on the current stream; the outputs are written in place. Defaults are the sizes, in elements, of the kernel's site."""
    BLOCK_ROWS = 1
    BLOCK_COLS = triton.next_power_of_2(cols)
    grid = (triton.cdiv(rows, BLOCK_ROWS),)
    fa_add_rmsnorm_3cb974[grid](
        weight, x, residual, out, rows, cols, x_stride0, residual_stride0, out_stride0,
        INDEX=tl.int32, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS, FULL=cols % BLOCK_COLS == 0,
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
        normal((3584,), (1,), torch.bfloat16),  # weight
        normal((1, 128, 3584), (458752, 3584, 1), torch.bfloat16),  # x
        normal((1, 128, 3584), (458752, 3584, 1), torch.bfloat16),  # residual
        torch.empty_strided((1, 128, 3584), (458752, 3584, 1), dtype=torch.bfloat16, device=device).zero_(),  # out
    )


def reference(weight, x, residual, out, *, dtype):
    """The same op by op, computed in dtype; the outputs are written in place."""
    device = weight.device

    def at(tensor, shape, strides, offset=0):
        # A view of a tensor's memory.
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

    def rounded(value, kind):
        # The original rounds here; the float64 truth does not.
        return value if dtype == torch.float64 else value.to(kind).to(dtype)

    weight_value = at(weight, (1, 3584), (0, 1)).to(dtype)
    x_value = at(x, (128, 3584), (3584, 1)).to(dtype)
    residual_value = at(residual, (128, 3584), (3584, 1)).to(dtype)
    total = x_value + residual_value
    row_sum = (total * total).sum(-1, keepdim=True)
    rounded_2 = rounded((total * torch.rsqrt(((row_sum / 3584.0) + 1e-06))), torch.bfloat16)
    at(out, (128, 3584), (3584, 1)).copy_(weight_value * rounded_2)


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
    for name, found, right, plain in zip(('out',), outputs, truth, own, strict=True):
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
        print(f"fa_add_rmsnorm_3cb974: {milliseconds * 1e3:.2f} us, {2759680 / milliseconds / 1e6:.1f} GB/s, cold L2 cache")
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
