"""What must not turn into NaN: exponentials and all that is made of them, on numbers around the overflow of exp.

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
from fusion_advisor.library.discover import list_kernels, load_references
from fusion_advisor.library.patterns import lower_graph
from tests.kernel_cases.on_device import plain

EDGES = [0.0, -0.0, 1e-30, 80.0, 87.3, 88.0, 88.7, 88.73, 89.0, 90.0, 100.0, 103.9, 104.1, 120.0, 127.9, 128.1, 130.0, 709.0,
         710.0, 1e3, 1e4]  # fmt: skip
DTYPES = ("float32", "float16", "bfloat16")


def functions():
    """Return name → (function, how many tensors of the edges' shape it takes)."""
    found = {
        "exp": torch.exp, "expm1": torch.expm1, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "silu": functional.silu,
        "gelu": functional.gelu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"), "erf": torch.erf,
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x), "softmax": lambda x: torch.softmax(x, -1),
        "masked_softmax": lambda x: torch.softmax(x.masked_fill(x > 125.0, float("-inf")), -1),
        "log_softmax": lambda x: torch.log_softmax(x, -1), "softplus": lambda x: torch.log1p(torch.exp(-x.abs())),
        "softcap": lambda x: 50.0 * torch.tanh(x / 50.0),
    }  # fmt: skip
    found = {name: (function, 1) for name, function in found.items()}
    for spec in list_kernels():
        shape = spec.inputs[0].shape
        is_packed = spec.name.endswith("_packed")  # the same expressions on halves of a row
        if spec.gemv is None and len(shape) == 2 and all(t.shape == shape for t in spec.inputs) and not is_packed:
            for variant, function in load_references(spec).references:
                found[f"{spec.name}-{variant}"] = (function, len(spec.inputs))
    return found


def edges(dtype):
    """Rows of both signs, each value among small ones: softmax sees every spread."""
    values = torch.tensor(EDGES, dtype=torch.float64)
    rows = torch.stack([values, -values, values * torch.tensor([1.0, -1.0]).repeat(len(EDGES))[: len(EDGES)], values / 1e4])
    return rows.to(getattr(torch, dtype))


def programs(dtypes=DTYPES):
    """Yield (name, function, inputs, program)."""
    for dtype in dtypes:
        x = edges(dtype)
        for name, (function, count) in functions().items():
            inputs = [x, *(torch.ones_like(x) for _ in range(count - 1))]
            lowered = next(lower_graph(trace(plain(function), inputs), ("x", "y", "z")[:count]))
            yield f"{name}-{dtype}", function, [inputs[i] for i in lowered.inputs], lowered.program


def complaint(function, inputs, out):
    """What is wrong with a result; empty when nothing is."""
    oracle = function(*(t.double() for t in inputs))
    want = oracle.to(out.dtype)  # what overflows in the output's dtype is Inf there
    limit = torch.finfo(out.dtype).max
    sure = (oracle.abs() < limit * 0.99) | (oracle.abs() > limit * 1.01)  # exp(88.73) is where rounding decides
    if not torch.equal(out.isnan(), want.isnan()):
        return f"NaN at {inputs[0][out.isnan() != want.isnan()].tolist()[:4]}"
    finite = torch.isfinite(want)
    if not torch.equal(out[~finite & sure], want[~finite & sure]):
        return f"infinite at the wrong places: {inputs[0][sure & (out != want) & ~finite].tolist()[:4]}"
    use = finite & sure & torch.isfinite(out)
    if not torch.equal(use, finite & sure):
        return f"infinite at {inputs[0][finite & sure & ~torch.isfinite(out)].tolist()[:4]}"
    allowed = 1.01 * torch.finfo(out.dtype).eps * (8 if out.dtype == torch.float32 else 1) * oracle[use].abs()
    # silu(-89) = -2e-37 is -89 times a sigmoid that is 0 in fp32: so it is in eager.
    allowed += 4e-6 * oracle[use].abs().clamp(max=1) + max(1e-36, torch.finfo(out.dtype).smallest_normal)
    wrong = (out[use].double() - oracle[use]).abs() > allowed
    return f"wrong at {inputs[0][use][wrong].tolist()[:4]}: {out[use][wrong].tolist()[:4]}" if bool(wrong.any()) else ""


def main(folder):
    backend, found = backend_of("triton"), {}
    for name, function, inputs, program in programs():
        header = Header(title="case", summary=name, origin="a test")
        for fast in (False, True):
            rendered = backend.render(program, header, tuning=Tuning(), fast_math=fast)
            out = torch.zeros_like(inputs[0])
            backend.build(rendered, Path(folder) / f"{rendered.entry}.py").bind(program)(*inputs, out)
            problem = complaint(function, inputs, out)
            # Fast math gives up digits, never NaN.
            found[f"{name}{'-fast' if fast else ''}"] = "" if fast and not problem.startswith("NaN") else problem
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
