"""Norms and variances of wide rows of every kind, against fp64 and eager.

Run as a program (TRITON_INTERPRET=1 is set here) it prints name → complaint for Triton's interpreter; the tests run the rest.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
from torch.nn import functional

from fusion_advisor.capture.graph.retrace import trace
from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.registry import backend as backend_of
from fusion_advisor.library.patterns import lower_graph
from fusion_advisor.verify.accuracy import error_of, unit_of
from tests.kernel_cases.on_device import plain

COLS = 16408
"""Wider than registers hold, and no multiple of a step: some lanes have a number less."""


def layernorm(x, weight):
    return functional.layer_norm(x, x.shape[-1:], weight, weight)


def by_hand(x, weight):
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-6) * weight


def std(x, _weight):
    return x.std(-1, correction=0)


def of_a_constant(x, _weight):
    return x - torch.full_like(x, 2.0).var(-1, correction=0, keepdim=True)


def mean_where_no_variance(x, _weight):
    mean, variance = x.mean(-1), x.var(-1, correction=0)
    return torch.where(torch.isnan(variance), mean, variance)


CASES = {
    f"{function.__name__}-{str(dtype)[6:]}": (function, dtype)
    for function, dtypes in {
        layernorm: (torch.float32, torch.float16, torch.bfloat16),
        by_hand: (torch.float32,),
        std: (torch.float32,),
        mean_where_no_variance: (torch.float32,),
        of_a_constant: (torch.float32,),
    }.items()
    for dtype in dtypes
}

INTERPRETED = (
    ("layernorm-float32", COLS), ("layernorm-float16", 16411), ("mean_where_no_variance-float32", COLS), ("std-float32", 20480),
    ("of_a_constant-float32", 20480),
)  # fmt: skip
"""With a row that ends among eight neighbours, and one of whole steps. No bfloat16: the interpreter truncates to it where the
device rounds."""


def rows(dtype, cols=COLS):
    """Return name → row."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(cols, generator=generator, dtype=torch.float64)
    inf, nan = float("inf"), float("nan")
    found = {
        "normal": normal, "mean 1e4": normal + 1e4, "constant": normal * 0 + 1.2345, "zero": normal * 0,
        "tiny": normal * 1e-20, "rising": normal.sort().values * 20, "all +inf": normal * 0 + inf,
    }  # fmt: skip
    if dtype != torch.float16:
        found["huge"] = normal * 1e15
    planted = {
        "outlier at the start": (0, 5e3), "outlier at the end": (-1, -5e3), "NaN": (0, nan), "NaN at the end": (-1, nan),
        "+inf": (cols // 3, inf), "-inf at the end": (-1, -inf),
    }  # fmt: skip
    for name, (place, value) in planted.items():
        found[name] = normal.clone()
        found[name][place] = value
    return found


def inputs(dtype, cols=COLS):
    """Every row, and a weight."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(cols, generator=generator, dtype=torch.float64).to(dtype)
    return torch.stack(list(rows(dtype, cols).values())).to(dtype), weight


def lowered(function, both):
    """The Program, its kernel's inputs, and room for its result."""
    found = next(lower_graph(trace(plain(function), list(both)), ("x", "weight")))
    return found.program, [both[n] for n in found.inputs], torch.zeros_like(function(*both))


def complaint(function, both, out):
    """What is wrong with a result; empty when nothing is.

    At most eager's error, 1.5 times that in fp32, or what rounding explains: half a unit of a 16-bit result, three of fp32, and
    of a mean that is large against the deviation its own rounding, in units of the deviation (of sqrt(eps) where there is none).
    """
    oracle = function(*(tensor.double() for tensor in both))
    factor = 1.5 if out.dtype == torch.float32 else 1.0
    for name, row, ours, theirs, truth in zip(
        rows(out.dtype, both[0].shape[1]), both[0], out, function(*both), oracle, strict=True
    ):
        own, eager = error_of(ours, truth), error_of(theirs, truth)
        if own.nonfinite > eager.nonfinite:
            return f"{name}: {own.nonfinite} of {own.elements} are NaN or infinite where they must not be, or finite where not"
        rounding = torch.finfo(torch.float32).eps * float(row.abs().max().nan_to_num(0, 0, 0))
        deviation = max(float(row.double().std(correction=0).nan_to_num(0)), 1e-3)
        least = max(2 * rounding / deviation, 3 * unit_of(torch.float32))
        if out.dtype != torch.float32:
            least = max(least, unit_of(out.dtype) / 2)
        if own.rel_l2 > max(factor * eager.rel_l2, least) and own.max_abs > least:
            return f"{name}: error {own.rel_l2:.2g}, eager's is {eager.rel_l2:.2g}, rounding explains {least:.2g}"
    return ""


def main(folder):
    backend, found = backend_of("triton"), {}
    for name, cols in INTERPRETED:
        function, dtype = CASES[name]
        both = inputs(dtype, cols)
        program, tensors, out = lowered(function, both)
        rendered = backend.render(program, Header(title="case", summary=name, origin="a test"), tuning=Tuning(), fast_math=False)
        backend.build(rendered, Path(folder) / f"{rendered.entry}.py").bind(program)(*tensors, out)
        found[f"{name} {cols}"] = complaint(function, both, out)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
