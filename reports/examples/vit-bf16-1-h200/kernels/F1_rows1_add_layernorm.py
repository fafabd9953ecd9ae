# add_layernorm: add -> layer_norm in one kernel
#
# Moves each operand once: x 2 B/column, residual 2 B/column, weight 2 B/column, bias 2 B/column, total
# 2 B/column, out 2 B/column.
# Maths in float32, rounded once, at the store.
# Tuning: num_warps=4
# Origin: library kernel add_layernorm, variant pre_norm.
# Source: https://arxiv.org/abs/1607.06450

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
def fa_add_layernorm_aa797a(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, total_ptr, out_ptr,
    rows, cols,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr,
):
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols

    x = to_float32(tl.load(x_ptr + col, mask=col_mask, other=0.0))
    residual = to_float32(tl.load(residual_ptr + col, mask=col_mask, other=0.0))
    total = x + residual
    total_sum = tl.sum(total, axis=1, keep_dims=True)
    total_mean = tl.div_rn(total_sum, tl.cast(cols, tl.float32))
    total_centered = total - total_mean
    total_centered_squared_sum = tl.sum(tl.where(col_mask, total_centered * total_centered, 0.0), axis=1, keep_dims=True)
    total_variance = tl.div_rn(total_centered_squared_sum, tl.cast(cols, tl.float32))
    eps = 1e-12
    inverse_deviation = tl.rsqrt(total_variance + eps)
    weight = to_float32(tl.load(weight_ptr + col, mask=col_mask, other=0.0))
    bias = to_float32(tl.load(bias_ptr + col, mask=col_mask, other=0.0))
    out = total_centered * inverse_deviation * weight + bias

    tl.store(total_ptr + col, total, mask=col_mask)
    tl.store(out_ptr + col, out, mask=col_mask)


# ---- launch, reference and check: python fa_add_layernorm_aa797a.py ----

import torch


def launch(
    x, residual, weight, bias, total, out,
    *,
    rows=1, cols=768,
):
    """Launch on the current stream; the outputs are written in place. Defaults are the sizes, in elements, of the kernel's site."""
    BLOCK_ROWS = 1
    BLOCK_COLS = triton.next_power_of_2(cols)
    grid = (triton.cdiv(rows, BLOCK_ROWS),)
    fa_add_layernorm_aa797a[grid](
        x, residual, weight, bias, total, out, rows, cols,
        INDEX=tl.int32, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS, FULL=cols % BLOCK_COLS == 0,
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
        normal((1, 1, 768), (768, 768, 1), torch.bfloat16),  # x
        normal((1, 197, 768), (151296, 768, 1), torch.bfloat16),  # residual
        normal((768,), (1,), torch.bfloat16),  # weight
        normal((768,), (1,), torch.bfloat16),  # bias
        torch.empty_strided((1, 1, 768), (768, 768, 1), dtype=torch.bfloat16, device=device).zero_(),  # total
        torch.empty_strided((1, 1, 768), (768, 768, 1), dtype=torch.bfloat16, device=device).zero_(),  # out
    )


def reference(x, residual, weight, bias, total, out, *, dtype):
    """The same op by op, computed in dtype; the outputs are written in place."""
    device = x.device

    def at(tensor, shape, strides, offset=0):
        # A view of a tensor's memory.
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

    x_value = at(x, (768,), (1,)).to(dtype)
    residual_value = at(residual, (768,), (1,)).to(dtype)
    total_2 = x_value + residual_value
    row_sum = total_2.sum(-1, keepdim=True)
    difference = total_2 - (row_sum / 768.0)
    row_sum_2 = (difference * difference).sum(-1, keepdim=True)
    weight_value = at(weight, (768,), (1,)).to(dtype)
    product = (difference * torch.rsqrt(((row_sum_2 / 768.0) + 1e-12))) * weight_value
    bias_value = at(bias, (768,), (1,)).to(dtype)
    at(total, (768,), (1,)).copy_(total_2)
    at(out, (768,), (1,)).copy_(product + bias_value)


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
    for name, found, right, plain in zip(('total', 'out'), outputs, truth, own, strict=True):
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
        print(f"fa_add_layernorm_aa797a: {milliseconds * 1e3:.2f} us, {9216 / milliseconds / 1e6:.1f} GB/s, cold L2 cache")
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
