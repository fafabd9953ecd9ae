"""Seeded inputs of the op `gelu_tanh`, and the same computation in plain PyTorch."""

import torch

INPUT_COUNT = 1
IN_PLACE = ()  # outputs that the op is given and writes into
OWN_DTYPE = torch.float32  # of the kernel's maths
FLOOR = 5e-07  # relative error that is allowed even where an op-by-op computation has none


def make_inputs(device):
    """Seeded inputs and zeroed outputs, laid out as at the kernel's site."""
    generator = torch.Generator().manual_seed(0)

    def laid_out(values, strides, dtype):
        tensor = torch.empty_strided(values.shape, strides, dtype=dtype, device=device)
        once = tuple(slice(None if step else 1) for step in strides)  # of rows that share memory the first counts
        tensor[once] = values[once]
        return tensor

    def normal(shape, strides, dtype):
        return laid_out(torch.randn(shape, generator=generator), strides, dtype)

    def whole(shape, strides, dtype, below):
        return laid_out(torch.randint(0, below, shape, generator=generator), strides, dtype)

    return (
        normal((32, 256), (256, 1), torch.float32),  # x
        torch.empty_strided((2, 16, 256), (4096, 256, 1), dtype=torch.float32, device=device).zero_(),  # out
    )


def reference(x, out, *, dtype):
    """The same op by op, computed in dtype; the outputs are written in place."""
    device = x.device

    def at(tensor, shape, strides, offset=0):
        # A view of a tensor's memory.
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)

    x_value = at(x, (8192,), (1,)).to(dtype)
    product = (x_value + ((x_value * (x_value * x_value)) * 0.044715)) * 1.5957691216057308
    at(out, (8192,), (1,)).copy_(x_value * torch.sigmoid(product))
