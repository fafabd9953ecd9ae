"""Norms and variances on every kind of row, narrow and wide, against fp64 and the better of eager and two plain passes in fp32.

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
from on_device import plain
from torch.nn import functional

from fusion_advisor.capture.graph import trace
from fusion_advisor.library.accuracy import error_of, is_within, unit_of
from fusion_advisor.library.build import backend as backend_of
from fusion_advisor.library.patterns import lower_graph
from fusion_advisor.library.source import Header, Tuning

COLS = (1, 24, 1000, 16400)
"""The last is wider than registers hold: its rows are walked in a loop."""


def _layernorm(x, weight):
    return functional.layer_norm(x, x.shape[-1:], weight, weight)


def _by_hand(x, weight):
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-6) * weight


def _mean_of_what_has_no_variance(x):
    mean, variance = x.mean(-1), x.var(-1, correction=0)
    return torch.where(torch.isnan(variance), mean, variance)


FUNCTIONS = {
    "layernorm": _layernorm,
    "by_hand": _by_hand,
    "layernorm_gelu": lambda x, weight: functional.gelu(_layernorm(x, weight)),
    "add_layernorm": lambda x, weight: _layernorm(x + weight, weight),
    "var": lambda x, _weight: x.var(-1),
    "std": lambda x, _weight: x.std(-1, correction=0),
    "mean_where_no_variance": lambda x, _weight: _mean_of_what_has_no_variance(x),
}
WIDE = ("layernorm", "std", "mean_where_no_variance")
"""What is run on wide rows too: the interpreter and a single host thread are slow."""


def rows(dtype, cols):
    """Return name → row."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(cols, generator=generator, dtype=torch.float64)
    inf, nan = float("inf"), float("nan")
    found = {
        "normal": normal, "mean 1e4": normal + 1e4, "mean -1e4": normal * 2 - 1e4, "constant": normal * 0 + 1.2345,
        "zero": normal * 0, "tiny": normal * 1e-20, "rising": normal.sort().values * 20, "outlier at the start": normal,
        "outlier at the end": normal, "NaN": normal, "NaN at the end": normal, "+inf": normal, "-inf": normal, "both inf": normal,
        "all +inf": normal * 0 + inf,
    }  # fmt: skip
    if dtype != torch.float16:
        found |= {"huge": normal * 1e15, "squares overflow": normal * 1e25, "constant 1e30": normal * 0 + 1e30}
    planted = {
        "outlier at the start": (0, 5e3), "outlier at the end": (cols - 1, -5e3), "NaN": (0, nan), "NaN at the end": (cols - 1, nan),
        "+inf": (cols // 3, inf), "-inf": (0, -inf), "both inf": (cols - 1, inf),
    }  # fmt: skip
    for name, (place, value) in planted.items():
        found[name] = found[name].clone()
        found[name][place] = value
    found["both inf"][0] = -inf
    return found


def inputs(dtype, cols):
    """Every row, and a weight."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(cols, generator=generator, dtype=torch.float64).to(dtype)
    return torch.stack(list(rows(dtype, cols).values())).to(dtype), weight


def programs():
    """Yield (name, function, inputs, kernel's inputs, program)."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for cols in COLS if dtype != torch.float16 else COLS[1:2]:
            both = inputs(dtype, cols)
            for name, function in FUNCTIONS.items():
                if cols == COLS[-1] and name not in WIDE:
                    continue
                lowered = next(lower_graph(trace(plain(function), list(both)), ("x", "weight")))
                yield f"{name}-{str(dtype)[6:]}-{cols}", function, both, [both[n] for n in lowered.inputs], lowered.program


def result_like(function, both):
    """An empty tensor for what a function returns."""
    return torch.zeros_like(function(*both))


def complaint(function, both, out, *, is_serial=False):
    """What is wrong with a result; empty when nothing is.

    A row whose squares overflow gives eager's result, not fp64's. Where a mean is large against the deviation, or there is none,
    what is left is the rounding of the mean: half a unit of it, against the deviation or sqrt(eps).

    Args:
        function: what was computed.
        both: its arguments.
        out: the result.
        is_serial: whether one thread has summed a whole wide row, one number after the other: fp32 sums are then off by far more.
    """
    oracle = function(*(tensor.double() for tensor in both))
    rounded = oracle.to(out.dtype).double()
    oracle = oracle.where(rounded.isfinite(), rounded)
    for name, row, ours, theirs, truth in zip(rows(out.dtype, both[0].shape[1]), both[0], out, function(*both), oracle, strict=True):
        own, eager = error_of(ours, truth), error_of(theirs, truth)
        if own.nonfinite > eager.nonfinite:
            return f"{name}: {own.nonfinite} of {own.elements} are NaN or infinite where they must not be, or finite where not"
        unit = torch.finfo(torch.float32).eps * float(row.abs().max().nan_to_num(0, 0, 0))
        deviation = max(float(row.double().std(correction=0).nan_to_num(0)), 1e-3)
        least = max((64 if is_serial else 2) * unit / deviation, 1e-3 if is_serial else 0, 3 * unit_of(torch.float32))
        if out.dtype != torch.float32:
            least = max(least, unit_of(out.dtype) / 2)
        if not is_within(own, eager, out.dtype) and min(own.rel_l2, own.max_abs) > least:
            return f"{name}: error {own.rel_l2:.2g}, eager's is {eager.rel_l2:.2g}, rounding explains {least:.2g}"
    return ""


def main(folder):
    backend, found = backend_of("triton"), {}
    for name, function, both, tensors, program in programs():
        if both[0].dtype == torch.bfloat16:
            continue  # the interpreter truncates to bfloat16 where the device rounds
        header = Header(title="case", summary=name, origin="a test")
        rendered = backend.render(program, header, tuning=Tuning(), fast_math=False)
        out = result_like(function, both)
        backend.build(rendered, Path(folder) / f"{rendered.entry}.py").bind(program)(*tensors, out)
        found[name] = complaint(function, both, out)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
