"""Seeded inputs of the op `transformer`, and the same computation in plain PyTorch."""

import torch

INPUT_COUNT = 6
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
        whole((2, 16), (16, 1), torch.int64, 97),  # x
        normal((97, 64), (64, 1), torch.float32),  # weight
        whole((16,), (1,), torch.int64, 32),  # x2
        normal((32, 64), (64, 1), torch.float32),  # weight2
        normal((64,), (1,), torch.float32),  # weight3
        normal((64,), (1,), torch.float32),  # bias
        torch.empty_strided((2, 16, 64), (1024, 64, 1), dtype=torch.float32, device=device).zero_(),  # out1
        torch.empty_strided((2, 16, 64), (1024, 64, 1), dtype=torch.float32, device=device).zero_(),  # out2
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

    x_value = at(x, (2, 16, 1), (16, 1, 0)).to(torch.int64)
    in_bounds = (x_value >= 0) & (x_value < 97)
    weight_value = take(weight, number((1, 1, 64), device) + x_value * 64, in_bounds).to(dtype)
    x2_value = at(x2, (1, 16, 1), (0, 1, 0)).to(torch.int64)
    in_bounds_2 = (x2_value >= 0) & (x2_value < 32)
    weight2_value = take(weight2, number((1, 1, 64), device) + x2_value * 64, in_bounds_2).to(dtype)
    total = weight_value + weight2_value
    row_sum = total.sum(-1, keepdim=True)
    difference = total - (row_sum / 64.0)
    row_sum_2 = (difference * difference).sum(-1, keepdim=True)
    weight3_value = at(weight3, (1, 1, 64), (0, 0, 1)).to(dtype)
    product = (difference * torch.rsqrt(((row_sum_2 / 64.0) + 1e-05))) * weight3_value
    bias_value = at(bias, (1, 1, 64), (0, 0, 1)).to(dtype)
    at(out1, (2, 16, 64), (1024, 64, 1)).copy_(total)
    at(out2, (2, 16, 64), (1024, 64, 1)).copy_(product + bias_value)
