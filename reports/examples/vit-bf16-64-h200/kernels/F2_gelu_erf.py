# gelu_erf: gelu in one kernel
#
# Moves each operand once: x 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# Origin: library kernel gelu_erf, variant builtin.
# Source: https://arxiv.org/abs/1606.08415

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def normal_cdf_16bit(x):
    # The normal distribution function to 3e-4 of itself down to x = -5.7 and to 3e-3 down to x = -13.3, where bfloat16 ends,
    # whose rounding costs 4e-3: 2 to the power of a polynomial in |x|, which is the minimax fit of log2(cdf(-|x|)). The sign of
    # its last coefficient makes it -inf for x = -inf.
    magnitude = tl.abs(x)
    power = -4.6692085e-07
    power = power * magnitude + 2.4229113e-05
    power = power * magnitude - 0.0005259484
    power = power * magnitude + 0.0063268477
    power = power * magnitude - 0.047913346
    power = power * magnitude - 0.4664553
    power = power * magnitude - 1.1472828
    power = power * magnitude - 1.0003203
    tail = tl.exp2(power)
    return tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def to_float32(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

# ---- kernel ----


@triton.jit
def fa_gelu_erf_ab2c47(
    x_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    x = to_float32(tl.load(x_ptr + index, mask=mask, other=0.0))
    out = x * normal_cdf_16bit(x)

    tl.store(out_ptr + index, out, mask=mask)


# ---- launch, reference and check: python fa_gelu_erf_ab2c47.py ----

import torch


def launch(
    x, out,
    *,
    size=38731776,
):
    """Launch on the current stream; the outputs are written in place. Defaults are the sizes, in elements, of the kernel's site."""
    BLOCK_COLS = 1024
    grid = (triton.cdiv(size, BLOCK_COLS),)
    fa_gelu_erf_ab2c47[grid](
        x, out, size,
        INDEX=tl.int32, BLOCK_COLS=BLOCK_COLS,
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
        normal((64, 197, 3072), (605184, 3072, 1), torch.bfloat16),  # x
        torch.empty_strided((64, 197, 3072), (605184, 3072, 1), dtype=torch.bfloat16, device=device).zero_(),  # out
    )


def reference(x, out, *, dtype):
    """The same op by op, computed in dtype; the outputs are written in place."""
    device = x.device

    def at(tensor, shape, strides, offset=0):
        # A view of a tensor's memory.
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

    x_value = at(x, (38731776,), (1,)).to(dtype)
    at(out, (38731776,), (1,)).copy_((x_value * 0.5) * torch.erfc((x_value * -0.7071067811865476)))


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
        print(f"fa_gelu_erf_ab2c47: {milliseconds * 1e3:.2f} us, {154927104 / milliseconds / 1e6:.1f} GB/s, cold L2 cache")
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
