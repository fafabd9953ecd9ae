"""Run cases through Triton's interpreter and print name → distance as JSON; a process of its own, see
test_backend_triton.py. Takes a folder, a mode (default, tuned or fast) and names; no names are all."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.triton.backend import TritonBackend
from tests.kernel_cases.cases import cases, distance, inputs
from tests.kernel_cases.evaluate import allocate, evaluate

MANY_ROWS = 70
"""A launch of many programs whose last tile is cut: each takes the interpreter 10 ms."""
WIDE = 16384
"""Rows wider than this are walked in a loop."""


def tuning_of(mode, program):
    """In the tuned mode tiles so small that every case has several; a looped row has as many steps with wider ones."""
    if mode != "tuned":
        return Tuning()
    return Tuning(block_cols=1024 if program.dims[-1] > WIDE else 64, block_rows=2, num_warps=2)


def main(folder, mode, *names):
    backend, found = TritonBackend(), {}
    chosen = cases(many_rows=MANY_ROWS)
    for name in names or chosen:
        program = chosen[name]
        header = Header(title="case", summary=name, origin="a test")
        rendered = backend.render(program, header, tuning=tuning_of(mode, program), fast_math=mode == "fast")
        kernel = backend.build(rendered, Path(folder) / f"{name}.py")
        tensors, outputs = inputs(name, program), allocate(program)
        kernel.bind(program)(*tensors, *outputs)
        oracle = evaluate(program, *tensors)
        found[name] = max((distance(name, *pair) for pair in zip(outputs, oracle, strict=True)), default=0.0)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
