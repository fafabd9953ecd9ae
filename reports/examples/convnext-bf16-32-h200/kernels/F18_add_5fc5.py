# encoder_stages_downsampling_layer: add in one kernel
#
# Moves each operand once: x 2 B/element, bias 2 B/column, out 2 B/element.
# Maths in float32, rounded once, at the store.
# Tuning: block_rows=8 num_warps=4
# Origin: generated from the chain.

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
def fa_encoder_stages_downsampling_layer_5cdbb2(
    x_ptr, bias_ptr, out_ptr,
    rows, cols: tl.constexpr, x_stride0: tl.constexpr, out_stride0: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = tl.program_id(0)
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask

    x = to_float32(tl.load(x_ptr + row * x_stride0 + col, mask=mask, other=0.0))
    bias = to_float32(tl.load(bias_ptr + col, mask=col_mask, other=0.0))
    out = x + bias

    tl.store(out_ptr + row * out_stride0 + col, out, mask=mask)


# ---- launch, reference and check: python fa_encoder_stages_downsampling_layer_5cdbb2.py ----

import torch


def launch(
    x, bias, out,
    *,
    rows=25088, cols=192, x_stride0=192, out_stride0=192,
):
    """Launch on the current stream; the outputs are written in place. Defaults are the sizes, in elements, of the kernel's site."""
    BLOCK_ROWS = 8
    BLOCK_COLS = 256
    grid = (triton.cdiv(rows, BLOCK_ROWS) * triton.cdiv(cols, BLOCK_COLS),)
    fa_encoder_stages_downsampling_layer_5cdbb2[grid](
        x, bias, out, rows, cols, x_stride0, out_stride0,
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
        normal((32, 192, 28, 28), (150528, 1, 5376, 192), torch.bfloat16),  # x
        normal((192,), (1,), torch.bfloat16),  # bias
        torch.empty_strided((32, 192, 28, 28), (150528, 1, 5376, 192), dtype=torch.bfloat16, device=device).zero_(),  # out
    )


def reference(x, bias, out, *, dtype):
    """The same op by op, computed in dtype; the outputs are written in place."""
    device = x.device

    def at(tensor, shape, strides, offset=0):
        # A view of a tensor's memory.
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

    x_value = at(x, (25088, 192), (192, 1)).to(dtype)
    bias_value = at(bias, (1, 192), (0, 1)).to(dtype)
    at(out, (25088, 192), (192, 1)).copy_(x_value + bias_value)


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
        print(f"fa_encoder_stages_downsampling_layer_5cdbb2: {milliseconds * 1e3:.2f} us, {19267968 / milliseconds / 1e6:.1f} GB/s, cold L2 cache")
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
