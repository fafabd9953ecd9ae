# gelu_tanh: mul -> pow -> mul -> add -> mul -> tanh -> add -> mul in one kernel
#
# Moves each operand once: x 4 B/element, out 4 B/element.
# Maths in float32, rounded once, at the store.
# Origin: library kernel gelu_tanh, variant written_out.
# Source: https://arxiv.org/abs/1606.08415

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def exp(x):
    # tl.exp rounds x * log2(e) once, which costs |x| / 2 ulp; the product's rounding error is put back here.
    scaled = x * 1.4426950408889634
    error = tl.fma(x, 1.4426950408889634, -scaled) + x * 1.925963033500e-08
    power = tl.exp2(scaled)
    # At 0 and inf there is nothing to put back, and an infinite x has no error: inf - inf would be NaN.
    return tl.where((power > 0.0) & (power < float("inf")), power + power * (error * 0.6931471805599453), power)


@triton.jit
def sigmoid(x):
    # For very negative x exp(-x) is inf and 1 / inf is 0: no overflow to guard.
    return 1.0 / (1.0 + exp(-x))

# ---- kernel ----


@triton.jit
def fa_gelu_tanh_361267(
    x_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    x = tl.load(x_ptr + index, mask=mask, other=0.0)
    product = (x + x * (x * x) * 0.044715) * 1.5957691216057308
    out = x * sigmoid(product)

    tl.store(out_ptr + index, out, mask=mask)


# ---- launch, reference and check: python fa_gelu_tanh_361267.py ----

import torch


def launch(
    x, out,
    *,
    size=3145728,
):
    """Launch on the current stream; the outputs are written in place. Defaults are the sizes, in elements, of the kernel's site."""
    BLOCK_COLS = 1024
    grid = (triton.cdiv(size, BLOCK_COLS),)
    fa_gelu_tanh_361267[grid](
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
        normal((1024, 3072), (3072, 1), torch.float32),  # x
        torch.empty_strided((1, 1024, 3072), (3145728, 3072, 1), dtype=torch.float32, device=device).zero_(),  # out
    )


def reference(x, out, *, dtype):
    """The same op by op, computed in dtype; the outputs are written in place."""
    device = x.device

    def at(tensor, shape, strides, offset=0):
        # A view of a tensor's memory.
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

    x_value = at(x, (3145728,), (1,)).to(dtype)
    product = (x_value + ((x_value * (x_value * x_value)) * 0.044715)) * 1.5957691216057308
    at(out, (3145728,), (1,)).copy_(x_value * torch.sigmoid(product))


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
        print(f"fa_gelu_tanh_361267: {milliseconds * 1e3:.2f} us, {25165824 / milliseconds / 1e6:.1f} GB/s, cold L2 cache")
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
