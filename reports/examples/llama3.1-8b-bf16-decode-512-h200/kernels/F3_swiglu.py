# swiglu: silu -> mul in one kernel
#
# Moves each operand once: gate 2 B/element, up 2 B/element, out 2 B/element.
# Maths in float32, rounded once, at the store.
# Tuning: block_cols=256 num_warps=4
# Origin: library kernel swiglu, variant builtin.
# Source: https://arxiv.org/abs/2002.05202

import triton
import triton.language as tl

# ---- helpers ----


@triton.jit
def sigmoid_16bit(x):
    # For results that are rounded to 11 bits at most. tl.exp, and the division, would take four instructions more each, and
    # the root keeps what is below 2^-126.
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def to_float32(x):
    # bfloat16 is the upper half of float32. Of two neighbours in a register each takes one instruction so, the upper one two by
    # a conversion.
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

# ---- kernel ----


@triton.jit
def fa_swiglu_bdec79(
    gate_ptr, up_ptr, out_ptr,
    size,
    INDEX: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    index = tl.program_id(0).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = index < size

    gate = to_float32(tl.load(gate_ptr + index, mask=mask, other=0.0))
    up = to_float32(tl.load(up_ptr + index, mask=mask, other=0.0))
    out = gate * sigmoid_16bit(gate) * up

    tl.store(out_ptr + index, out, mask=mask)


# ---- launch, reference and check: python fa_swiglu_bdec79.py ----

import torch


def launch(
    gate, up, out,
    *,
    size=14336,
):
    """Launch on the current stream; the outputs are written in place. Defaults are the sizes, in elements, of the kernel's site."""
    BLOCK_COLS = 256
    grid = (triton.cdiv(size, BLOCK_COLS),)
    fa_swiglu_bdec79[grid](
        gate, up, out, size,
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
        normal((1, 1, 14336), (14336, 14336, 1), torch.bfloat16),  # gate
        normal((1, 1, 14336), (14336, 14336, 1), torch.bfloat16),  # up
        torch.empty_strided((1, 1, 14336), (14336, 14336, 1), dtype=torch.bfloat16, device=device).zero_(),  # out
    )


def reference(gate, up, out, *, dtype):
    """The same op by op, computed in dtype; the outputs are written in place."""
    device = gate.device

    def at(tensor, shape, strides, offset=0):
        # A view of a tensor's memory.
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

    gate_value = at(gate, (14336,), (1,)).to(dtype)
    up_value = at(up, (14336,), (1,)).to(dtype)
    at(out, (14336,), (1,)).copy_((gate_value * torch.sigmoid(gate_value)) * up_value)


def main():
    """Check the kernel against float64 and print how fast it moves its bytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = make_inputs(device)
    inputs, outputs = tensors[:2], tensors[2:]
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
        print(f"fa_swiglu_bdec79: {milliseconds * 1e3:.2f} us, {86016 / milliseconds / 1e6:.1f} GB/s, cold L2 cache")
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
