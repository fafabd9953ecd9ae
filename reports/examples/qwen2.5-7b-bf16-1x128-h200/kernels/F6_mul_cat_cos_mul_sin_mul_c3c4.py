# model_rotary_emb: mul -> cat -> cos -> mul -> sin -> mul -> to -> to in one kernel
#
# Moves each operand once: inv_freq 4 B/column, x 4 B/row, out1 2 B/element, out2 2 B/element.
# Maths in float32, rounded once, at the store.
# Tuning: block_rows=2 num_warps=4
# Origin: generated from the chain.

import triton
import triton.language as tl


@triton.jit
def fa_model_rotary_emb_4d74fa(
    inv_freq_ptr, x_ptr, out1_ptr, out2_ptr,
    rows, cols: tl.constexpr, out1_stride0: tl.constexpr, out1_offset: tl.constexpr, out2_stride0: tl.constexpr,
    out2_offset: tl.constexpr,
    INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):
    tile = tl.program_id(0)
    col_tiles = tl.cdiv(cols, BLOCK_COLS)
    col = (tile % col_tiles).to(INDEX) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    row = (tile // col_tiles).to(INDEX) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row_mask = row < rows
    col_mask = col < cols
    mask = row_mask & col_mask

    inv_freq = tl.load(inv_freq_ptr + col, mask=col_mask, other=0.0)
    x = tl.load(x_ptr + row, mask=row_mask, other=0.0)
    product = inv_freq * x
    cos_product = tl.cos(product)
    sin_product = tl.sin(product)

    tl.store(out1_ptr + row * out1_stride0 + col, cos_product, mask=mask)
    tl.store(out1_ptr + row * out1_stride0 + col + out1_offset, cos_product, mask=mask)
    tl.store(out2_ptr + row * out2_stride0 + col, sin_product, mask=mask)
    tl.store(out2_ptr + row * out2_stride0 + col + out2_offset, sin_product, mask=mask)


# ---- launch, reference and check: python fa_model_rotary_emb_4d74fa.py ----

import torch


def launch(
    inv_freq, x, out1, out2,
    *,
    rows=128, cols=64, out1_stride0=128, out1_offset=64, out2_stride0=128, out2_offset=64,
):
    """Launch on the current stream; the outputs are written in place. Defaults are the sizes, in elements, of the kernel's site."""
    BLOCK_ROWS = 2
    BLOCK_COLS = 64
    grid = (triton.cdiv(rows, BLOCK_ROWS) * triton.cdiv(cols, BLOCK_COLS),)
    fa_model_rotary_emb_4d74fa[grid](
        inv_freq, x, out1, out2, rows, cols, out1_stride0, out1_offset, out2_stride0, out2_offset,
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
        normal((64,), (1,), torch.float32),  # inv_freq
        normal((1, 1, 128), (128, 128, 1), torch.float32),  # x
        torch.empty_strided((1, 128, 128), (16384, 128, 1), dtype=torch.bfloat16, device=device).zero_(),  # out1
        torch.empty_strided((1, 128, 128), (16384, 128, 1), dtype=torch.bfloat16, device=device).zero_(),  # out2
    )


def reference(inv_freq, x, out1, out2, *, dtype):
    """The same op by op, computed in dtype; the outputs are written in place."""
    device = inv_freq.device

    def at(tensor, shape, strides, offset=0):
        # A view of a tensor's memory.
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

    inv_freq_value = at(inv_freq, (1, 64), (0, 1)).to(dtype)
    x_value = at(x, (128, 1), (1, 0)).to(dtype)
    product = inv_freq_value * x_value
    cos_value = torch.cos(product)
    sin_value = torch.sin(product)
    at(out1, (128, 64), (128, 1)).copy_(cos_value)
    at(out1, (128, 64), (128, 1), 64).copy_(cos_value)
    at(out2, (128, 64), (128, 1)).copy_(sin_value)
    at(out2, (128, 64), (128, 1), 64).copy_(sin_value)


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
        print(f"fa_model_rotary_emb_4d74fa: {milliseconds * 1e3:.2f} us, {66304 / milliseconds / 1e6:.1f} GB/s, cold L2 cache")
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
