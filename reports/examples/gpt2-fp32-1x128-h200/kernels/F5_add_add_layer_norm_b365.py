# transformer: add -> add -> layer_norm in one kernel
#
# Moves each operand once: x 4 B/element, x2 4 B/element, bias 4 B/column, weight 4 B/column, bias2 4 B/column,
# out 4 B/element.
# Maths in float32, rounded once, at the store.
# Tuning: num_warps=8
# Origin: generated from the chain.

import triton
import triton.language as tl


@triton.jit
def fa_transformer_420ab7(
    x_ptr, x2_ptr, bias_ptr, weight_ptr, bias2_ptr, out_ptr,
    rows, cols, x_stride0, x2_stride0, out_stride0,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    row_mask = row < rows
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
    mask = row_mask & col_mask

    x = tl.load(x_ptr + row * x_stride0 + col, mask=mask, other=0.0)
    x2 = tl.load(x2_ptr + row * x2_stride0 + col, mask=mask, other=0.0)
    bias = tl.load(bias_ptr + col, mask=col_mask, other=0.0)
    total = x + (x2 + bias)
    total_sum = tl.sum(total, axis=1, keep_dims=True)
    total_mean = tl.div_rn(total_sum, tl.cast(cols, tl.float32))
    total_centered = total - total_mean
    total_centered_squared_sum = tl.sum(tl.where(col_mask, total_centered * total_centered, 0.0), axis=1, keep_dims=True)
    total_variance = tl.div_rn(total_centered_squared_sum, tl.cast(cols, tl.float32))
    rsqrt_total = tl.rsqrt(total_variance + 1e-05)
    weight = tl.load(weight_ptr + col, mask=col_mask, other=0.0)
    bias2 = tl.load(bias2_ptr + col, mask=col_mask, other=0.0)
    out = total_centered * rsqrt_total * weight + bias2

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)


# ---- launch, reference and check: python fa_transformer_420ab7.py ----

import torch


def launch(
    x, x2, bias, weight, bias2, out,
    *,
    rows=128, cols=768, x_stride0=768, x2_stride0=768, out_stride0=768,
):
    """Launch on the current stream; the outputs are written in place. Defaults are the sizes, in elements, of the kernel's site."""
    BLOCK_ROWS = 1
    BLOCK_COLS = triton.next_power_of_2(cols)
    grid = (triton.cdiv(rows, BLOCK_ROWS),)
    fa_transformer_420ab7[grid](
        x, x2, bias, weight, bias2, out, rows, cols, x_stride0, x2_stride0, out_stride0,
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
        normal((1, 128, 768), (98304, 768, 1), torch.float32),  # x
        normal((128, 768), (768, 1), torch.float32),  # x2
        normal((768,), (1,), torch.float32),  # bias
        normal((768,), (1,), torch.float32),  # weight
        normal((768,), (1,), torch.float32),  # bias2
        torch.empty_strided((1, 128, 768), (98304, 768, 1), dtype=torch.float32, device=device).zero_(),  # out
    )


def reference(x, x2, bias, weight, bias2, out, *, dtype):
    """The same op by op, computed in dtype; the outputs are written in place."""
    device = x.device

    def at(tensor, shape, strides, offset=0):
        # A view of a tensor's memory.
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

    x_value = at(x, (128, 768), (768, 1)).to(dtype)
    x2_value = at(x2, (128, 768), (768, 1)).to(dtype)
    bias_value = at(bias, (1, 768), (0, 1)).to(dtype)
    total = x_value + (x2_value + bias_value)
    row_sum = total.sum(-1, keepdim=True)
    difference = total - (row_sum / 768.0)
    row_sum_2 = (difference * difference).sum(-1, keepdim=True)
    weight_value = at(weight, (1, 768), (0, 1)).to(dtype)
    product = (difference * torch.rsqrt(((row_sum_2 / 768.0) + 1e-05))) * weight_value
    bias2_value = at(bias2, (1, 768), (0, 1)).to(dtype)
    at(out, (128, 768), (768, 1)).copy_(product + bias2_value)


def main():
    """Check the kernel against float64 and print how fast it moves its bytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = make_inputs(device)
    inputs, outputs = tensors[:5], tensors[5:]
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
        print(f"fa_transformer_420ab7: {milliseconds * 1e3:.2f} us, {1188864 / milliseconds / 1e6:.1f} GB/s, cold L2 cache")
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
