# transformer: embedding -> embedding -> add -> layer_norm in one kernel
#
# Moves each operand once: x 8 B/row, weight 2 B/column, x2 8 B/row, weight2 2 B/column, weight3 2 B/column,
# bias 2 B/column, out1 2 B/element, out2 2 B/element.
# Maths in float32, rounded once, at the store.
# Origin: generated from the chain.

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
def fa_transformer_ef358a(
    x_ptr, weight_ptr, x2_ptr, weight2_ptr, weight3_ptr, bias_ptr, out1_ptr, out2_ptr,
    rows, size1, cols, x_stride0, weight_extent, weight_step0, weight2_extent, weight2_step0, out1_stride0,
    out1_stride1, out2_stride0, out2_stride1,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, FULL: tl.constexpr,
):
    row = tl.program_id(0).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    i1 = row % size1
    i0 = row // size1
    col = tl.arange(0, BLOCK_COLS)[None, :].to(INDEX)
    row_mask = row < rows
    col_mask = tl.full([1, BLOCK_COLS], True, tl.int1) if FULL else col < cols
    mask = row_mask & col_mask
    x_row = x_ptr + i0 * x_stride0 + i1
    out1_row = out1_ptr + i0 * out1_stride0 + i1 * out1_stride1
    out2_row = out2_ptr + i0 * out2_stride0 + i1 * out2_stride1

    x = tl.load(x_row, mask=row_mask, other=0)
    weight_in_bounds = checked(x, weight_extent, row_mask)
    weight = to_float32(tl.load(weight_ptr + x * weight_step0 + col, mask=mask & weight_in_bounds, other=0.0))
    x2 = tl.load(x2_ptr + i1, mask=row_mask, other=0)
    weight2_in_bounds = checked(x2, weight2_extent, row_mask)
    weight2 = to_float32(tl.load(weight2_ptr + x2 * weight2_step0 + col, mask=mask & weight2_in_bounds, other=0.0))
    out1 = weight + weight2
    total_sum = tl.sum(out1, axis=1, keep_dims=True)
    total_mean = tl.div_rn(total_sum, tl.cast(cols, tl.float32))
    total_centered = out1 - total_mean
    total_centered_squared_sum = tl.sum(tl.where(col_mask, total_centered * total_centered, 0.0), axis=1, keep_dims=True)
    total_variance = tl.div_rn(total_centered_squared_sum, tl.cast(cols, tl.float32))
    rsqrt_total = tl.rsqrt(total_variance + 1e-05)
    weight3 = to_float32(tl.load(weight3_ptr + col, mask=col_mask, other=0.0))
    bias = to_float32(tl.load(bias_ptr + col, mask=col_mask, other=0.0))
    out2 = total_centered * rsqrt_total * weight3 + bias

    tl.store(out1_row + col, out1, mask=mask)
    tl.store(out2_row + col, out2, mask=mask)


# ---- launch, reference and check: python fa_transformer_ef358a.py ----

import torch


def launch(
    x, weight, x2, weight2, weight3, bias, out1, out2,
    *,
    rows=4096, size1=512, cols=768, x_stride0=512, weight_extent=50257, weight_step0=768, weight2_extent=1024,
    weight2_step0=768, out1_stride0=393216, out1_stride1=768, out2_stride0=393216, out2_stride1=768,
):
    """Launch on the current stream; the outputs are written in place. Defaults are the sizes, in elements, of the kernel's site."""
    BLOCK_ROWS = 1
    BLOCK_COLS = triton.next_power_of_2(cols)
    grid = (triton.cdiv(rows, BLOCK_ROWS),)
    fa_transformer_ef358a[grid](
        x, weight, x2, weight2, weight3, bias, out1, out2, rows, size1, cols, x_stride0, weight_extent, weight_step0,
        weight2_extent, weight2_step0, out1_stride0, out1_stride1, out2_stride0, out2_stride1,
        INDEX=tl.int32, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS, FULL=cols % BLOCK_COLS == 0,
        num_warps=2, enable_fp_fusion=True, debug=True, sanitize_overflow=False,
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
        whole((8, 512), (512, 1), torch.int64, 50257),  # x
        normal((50257, 768), (768, 1), torch.bfloat16),  # weight
        whole((512,), (1,), torch.int64, 1024),  # x2
        normal((1024, 768), (768, 1), torch.bfloat16),  # weight2
        normal((768,), (1,), torch.bfloat16),  # weight3
        normal((768,), (1,), torch.bfloat16),  # bias
        torch.empty_strided((8, 512, 768), (393216, 768, 1), dtype=torch.bfloat16, device=device).zero_(),  # out1
        torch.empty_strided((8, 512, 768), (393216, 768, 1), dtype=torch.bfloat16, device=device).zero_(),  # out2
    )


def reference(x, weight, x2, weight2, weight3, bias, out1, out2, *, dtype):
    """The same op by op, computed in dtype; the outputs are written in place."""
    device = x.device

    def number(shape, device):
        # The loop variable of the one dim that is not 1.
        return torch.arange(max(shape), device=device).reshape(shape)

    def at(tensor, shape, strides, offset=0):
        # A view of a tensor's memory.
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

    def take(tensor, address, wanted=True):
        # Elements by address; 0 where none is wanted.
        wanted = torch.as_tensor(wanted, device=device)
        memory = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset(),), (1,))
        found = memory[torch.where(wanted, torch.as_tensor(address, device=device), 0)]
        return torch.where(wanted, found, torch.zeros((), dtype=tensor.dtype, device=device))

    x_value = at(x, (8, 512, 1), (512, 1, 0)).to(torch.int64)
    in_bounds = (x_value >= 0) & (x_value < 50257)
    weight_value = take(weight, number((1, 1, 768), device) + x_value * 768, in_bounds).to(dtype)
    x2_value = at(x2, (1, 512, 1), (0, 1, 0)).to(torch.int64)
    in_bounds_2 = (x2_value >= 0) & (x2_value < 1024)
    weight2_value = take(weight2, number((1, 1, 768), device) + x2_value * 768, in_bounds_2).to(dtype)
    total = weight_value + weight2_value
    row_sum = total.sum(-1, keepdim=True)
    difference = total - (row_sum / 768.0)
    row_sum_2 = (difference * difference).sum(-1, keepdim=True)
    weight3_value = at(weight3, (1, 1, 768), (0, 0, 1)).to(dtype)
    product = (difference * torch.rsqrt(((row_sum_2 / 768.0) + 1e-05))) * weight3_value
    bias_value = at(bias, (1, 1, 768), (0, 0, 1)).to(dtype)
    at(out1, (8, 512, 768), (393216, 768, 1)).copy_(total)
    at(out2, (8, 512, 768), (393216, 768, 1)).copy_(product + bias_value)


def main():
    """Check the kernel against float64 and print how fast it moves its bytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = make_inputs(device)
    inputs, outputs = tensors[:6], tensors[6:]
    truth = [torch.zeros_like(o, dtype=torch.float64 if o.is_floating_point() else o.dtype) for o in outputs]
    own = [torch.zeros_like(o, dtype=torch.float32 if o.is_floating_point() else o.dtype) for o in outputs]
    reference(*inputs, *truth, dtype=torch.float64)
    reference(*inputs, *own, dtype=torch.float32)
    launch(*tensors)
    is_right = True
    for name, found, right, plain in zip(('out1', 'out2'), outputs, truth, own, strict=True):
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
        print(f"fa_transformer_ef358a: {milliseconds * 1e3:.2f} us, {19700736 / milliseconds / 1e6:.1f} GB/s, cold L2 cache")
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
