"""Softmax and its relatives on every kind of row, narrow and wide, against fp64 and eager's own error.

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

from fusion_advisor.capture.graph.retrace import trace
from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.registry import backend as backend_of
from fusion_advisor.library.patterns import lower_graph
from fusion_advisor.verify.accuracy import error_of, is_within, unit_of
from tests.kernel_cases.on_device import plain

COLS = (1, 24, 16400)
"""The last is wider than registers hold: its rows are walked in a loop."""


def _by_hand(x):
    exponential = torch.exp(x - x.amax(-1, keepdim=True))
    return exponential / exponential.sum(-1, keepdim=True)


FUNCTIONS = {
    "softmax": lambda x, _mask: torch.softmax(x, -1),
    "log_softmax": lambda x, _mask: torch.log_softmax(x, -1),
    "logsumexp": lambda x, _mask: torch.logsumexp(x, -1),
    "by_hand": lambda x, _mask: _by_hand(x),
    "scaled": lambda x, _mask: torch.softmax(x * 0.3, -1),
    "scaled_logsumexp": lambda x, _mask: torch.logsumexp(x * 0.3, -1),
    "masked": lambda x, mask: torch.softmax(x + mask, -1),
    "masked_then_scaled": lambda x, mask: torch.softmax((x + mask) * 0.3, -1),
    "filled_then_scaled": lambda x, mask: torch.softmax(x.masked_fill(mask < 0, float("-inf")) * 0.3, -1),
    "safe": lambda x, mask: torch.ops.aten._safe_softmax.default(x.masked_fill(mask < 0, float("-inf")), -1),
}
MASKED = ("masked", "masked_then_scaled", "filled_then_scaled", "safe")
"""What reads the mask: to the others a row under another one is the same row."""
WIDE = ("softmax", "log_softmax", "scaled_logsumexp", "masked_then_scaled", "safe")
"""What is run on wide rows too: the interpreter and a single host thread are slow."""


def rows(dtype, cols):
    """Return name → row."""
    generator = torch.Generator().manual_seed(0)
    limit = torch.finfo(dtype).max
    normal = torch.randn(cols, generator=generator, dtype=torch.float64)
    inf = float("inf")
    found = {
        "normal": normal, "large": normal * 3e3, "tiny": normal * 1e-4, "zero": normal * 0, "rising": normal.sort().values * 20,
        "falling": normal.sort(descending=True).values * 20, "1e27": torch.full_like(normal, 1.2345e27), "1e27 and small": normal,
        "highest": normal, "lowest": torch.full_like(normal, -limit), "NaN": normal, "NaN at the end": normal, "+inf": normal,
        "-inf": normal, "both inf": normal, "all +inf": normal * 0 + inf, "all -inf": normal * 0 - inf,
    }  # fmt: skip
    planted = {
        "1e27 and small": (0, 1.2345e27), "highest": (cols // 2, limit), "NaN": (0, float("nan")), "+inf": (cols // 3, inf),
        "NaN at the end": (cols - 1, float("nan")), "-inf": (0, -inf), "both inf": (cols - 1, inf),
    }  # fmt: skip
    for name, (place, value) in planted.items():
        found[name] = found[name].clone()
        found[name][place] = value
    found["both inf"][0] = -inf
    return {name: row.clamp(-limit, limit).where(row.isfinite(), row) for name, row in found.items()}


def inputs(dtype, cols):
    """Every row as it is, and once more under a mask that hides it all."""
    found = torch.stack(list(rows(dtype, cols).values())).to(dtype)
    mask = torch.zeros_like(found)
    mask[:, cols // 2 :] = torch.finfo(dtype).min
    hidden = torch.full_like(found, torch.finfo(dtype).min)
    return torch.cat([found, found]), torch.cat([mask, hidden])


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def programs(dtypes=DTYPES):
    """Yield (name, function, both inputs, the program's operands, program)."""
    for dtype in dtypes:
        for cols in COLS if dtype != torch.float16 else COLS[1:2]:
            twice = inputs(dtype, cols)
            for name, function in FUNCTIONS.items():
                if cols == COLS[-1] and name not in WIDE:
                    continue
                both = twice if name in MASKED else tuple(tensor[: len(tensor) // 2].clone() for tensor in twice)
                lowered = next(lower_graph(trace(plain(function), list(both)), ("x", "mask")))
                yield f"{name}-{str(dtype)[6:]}-{cols}", function, both, [both[n] for n in lowered.inputs], lowered.program


def result_like(function, both):
    """An empty tensor for what a function returns."""
    return torch.zeros_like(function(*both))


def complaint(function, both, out, *, is_serial=False):
    """What is wrong with a result; empty when nothing is.

    Args:
        function: what was computed.
        both: its arguments.
        out: the result.
        is_serial: whether one thread has summed a whole row, one number after the other: then fp32 sums are off by far more.
    """
    oracle = function(*(tensor.double() for tensor in both))
    rounded = oracle.to(out.dtype).double()
    oracle = oracle.where(rounded.isfinite(), rounded)  # what overflows in the output's dtype is inf there
    names = [f"{name}{suffix}" for suffix in ("", ", hidden") for name in rows(out.dtype, both[0].shape[1])][: len(out)]
    for name, ours, theirs, truth in zip(names, out, function(*both), oracle, strict=True):
        own, eager = error_of(ours, truth), error_of(theirs, truth)
        if own.nonfinite > eager.nonfinite:
            return f"{name}: {own.nonfinite} of {own.elements} are NaN or infinite where they must not be, or finite where not"
        # A row of two dozen has few additions: by their order alone its sum in fp32 is one unit further off.
        least = 1e-3 if is_serial else 3 * unit_of(out.dtype) if out.dtype == torch.float32 else 0
        if not is_within(own, eager, out.dtype) and own.rel_l2 > least:
            return f"{name}: error {own.rel_l2:.2g}, eager's is {eager.rel_l2:.2g}"
    return ""


def main(folder):
    backend, found = backend_of("triton"), {}
    # The interpreter truncates to bfloat16 where the device rounds.
    for name, function, both, tensors, program in programs(DTYPES[:2]):
        header = Header(title="case", summary=name, origin="a test")
        rendered = backend.render(program, header, tuning=Tuning(), fast_math=False)
        out = result_like(function, both)
        backend.build(rendered, Path(folder) / f"{rendered.entry}.py").bind(program)(*tensors, out)
        found[name] = complaint(function, both, out)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
