"""Pools and repeats in chains, and group norms of images in channels last.

Run as a script: Triton kernels of some in the interpreter.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
from torch.nn import functional

LAST, FIRST = torch.channels_last, torch.contiguous_format
IMAGES = (2, 16, 6, 7)


def pool_former(x, scale, residual):
    return residual + scale * (functional.avg_pool2d(x, 3, 1, 1, False, False) - x)


def padded_mean(x):
    return functional.avg_pool2d(x, (3, 2), (2, 1), (1, 1), True) * 2


def over_a_number(x):
    return functional.avg_pool2d(torch.relu(x), (5, 3), (1, 2), (2, 0), divisor_override=7) + 1


def stem(x):
    return functional.max_pool2d(torch.relu(x) - 2, 3, 2, 1)


def dilated(x):
    return functional.max_pool2d(x, 2, 1, 1, 2, True) * 0.5


def normed_last(x, weight, bias):
    return functional.group_norm(x * 2, 1, weight, bias).contiguous(memory_format=LAST)


def normed_groups(x, residual, time, weight, bias):
    """A diffusion net's: what the norm reads is a sum, and SiLU follows."""
    normed = functional.group_norm(x + residual + time, 3, weight, bias, 1e-6).contiguous(memory_format=LAST)
    return functional.silu(normed)


def normed_pairs(x):
    return functional.group_norm(x, x.shape[1] // 2).contiguous(memory_format=LAST) * 2


NORMS = (normed_last, normed_groups, normed_pairs)


def repeated(x):
    return (x * 2).repeat(2, 1, 1, 3) + 1


def repeated_and_cut(x, residual):
    return residual - torch.relu(x).repeat(3, 1, 2, 1, 1)[:, :, 1:-1]


def heads_repeated(x):
    return x.flatten(1, 2).permute(0, 2, 1).unflatten(2, (2, -1)).permute(0, 2, 1, 3).contiguous().flatten(0, 1).repeat(3, 1, 1)


def _cases():
    for layout in (LAST, FIRST):
        name = "last" if layout is LAST else "first"
        yield f"mean less itself, {name}", (pool_former, layout, IMAGES, (16, 1, 1), IMAGES)
        yield f"padded mean, {name}", (padded_mean, layout, IMAGES)
        yield f"mean over a number, {name}", (over_a_number, layout, (1, 8, 9, 7))
        yield f"maximum, {name}", (stem, layout, IMAGES)
        yield f"dilated maximum, {name}", (dilated, layout, IMAGES)
        yield f"repeat, {name}", (repeated, layout, IMAGES)
        yield f"cut repeat, {name}", (repeated_and_cut, layout, IMAGES, (3, 2, 30, 6, 7))
    yield "repeat of copied heads", (heads_repeated, FIRST, (2, 4, 8, 7))
    yield "group norm, last", (normed_last, LAST, IMAGES, (16,), (16,))
    yield "group norm of odd channels, last", (normed_last, LAST, (2, 9, 5, 3), (9,), (9,))
    yield "group norm in parts, last", (normed_last, LAST, (2, 24, 30, 27), (24,), (24,))
    for name, images in (("", (2, 24, 6, 7)), (" of one image", (1, 15, 5, 4)), (" in parts", (2, 24, 42, 36))):
        of_image = (images[0], images[1], 1, 1)
        yield f"group norm of groups{name}, last", (normed_groups, LAST, images, images, of_image, (images[1],), (images[1],))
    yield "group norm of pairs in parts, last", (normed_pairs, LAST, (1, 64, 32, 36))


CASES = dict(_cases())
INTERPRETED = (
    "mean less itself, last", "mean less itself, first", "padded mean, last", "mean over a number, first", "maximum, last",
    "repeat, last", "repeat, first", "cut repeat, last", "repeat of copied heads", "group norm, last",
    "group norm in parts, last", "group norm of groups, last", "group norm of groups in parts, last",
    "group norm of pairs in parts, last",
)  # fmt: skip


def make_inputs(name, dtype):
    """Return the tensors of a case; the images of pools hold NaN and infinities, in channels of their own."""
    function, layout, *shapes = CASES[name]
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    if function not in NORMS:
        for channel, (number, row, column) in enumerate(((math.nan, 2, 3), (math.inf, 0, 0), (-math.inf, 4, 4))):
            found[0][0, channel, row, column] = number
    return [one.contiguous(memory_format=layout) if one.dim() == 4 else one for one in found]


def complaint(name, inputs, out):
    """Say what is wrong with a result: numbers that eager's error does not excuse, or other infinities; empty where all is right.

    The interpreter cuts bfloat16 off where a GPU rounds it, which doubles the error.
    """
    function = CASES[name][0]
    eager, truth = function(*inputs), function(*(one.double() for one in inputs))
    if not torch.equal(out.isnan(), truth.isnan()) or not torch.equal(out.isinf(), truth.isinf()):
        return f"{name}: NaN or infinity elsewhere"
    error, own = ((one.double() - truth)[truth.isfinite()].abs().max().item() for one in (out, eager))
    least = (2**-21 if out.dtype == torch.float32 else 2**-8) * truth[truth.isfinite()].abs().max().item()
    return "" if error <= 2 * own + least else f"{name}: {error:.2e} off, eager {own:.2e}"


def empty_result(lowered, ops):
    """What a lowered case writes into, in the layout that eager's result has."""
    meta = ops[lowered.outputs[0]].outputs[0]
    return torch.empty_strided(meta.shape, meta.stride, dtype=getattr(torch, meta.dtype)).fill_(3)


def main(folder):
    from fusion_advisor.codegen.common.interface import Header, Tuning
    from fusion_advisor.codegen.triton.backend import TritonBackend
    from tests.kernel_cases.lowered import lower_function

    header = Header(title="case", summary="a test", origin="a test")
    for name in INTERPRETED:
        for dtype in (torch.float32, torch.bfloat16):
            inputs = make_inputs(name, dtype)
            lowered, ops = lower_function(CASES[name][0], *inputs)
            out = empty_result(lowered, ops)
            rendered = TritonBackend().render(lowered.program, header, tuning=Tuning(), fast_math=False)
            launch = TritonBackend().build(rendered, Path(folder) / f"{rendered.entry}.py").bind(lowered.program)
            launch(*(inputs[root] for root in lowered.inputs), out)
            assert not complaint(name, inputs, out), complaint(name, inputs, out)


if __name__ == "__main__":
    main(sys.argv[1])
