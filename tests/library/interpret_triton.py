"""Run every case through Triton's interpreter and print name → distance as JSON; a process of its own, see
test_backend_triton.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
from cases import cases, distance, inputs
from evaluate import allocate, evaluate

from fusion_advisor.library.backend_triton import TritonBackend
from fusion_advisor.library.source import Header, Tuning


def main(folder, *options):
    backend, found = TritonBackend(), {}
    for name, program in cases().items():
        header = Header(title="case", summary=name, origin="a test")
        tuning = Tuning(block_cols=64, block_rows=2, num_warps=2) if "tuned" in options else Tuning()
        rendered = backend.render(program, header, tuning=tuning, fast_math="fast" in options)
        kernel = backend.build(rendered, Path(folder) / f"{name}.py")
        tensors, outputs = inputs(name, program), allocate(program)
        kernel.bind(program)(*tensors, *outputs)
        oracle = evaluate(program, *tensors)
        found[name] = max((distance(name, *pair) for pair in zip(outputs, oracle, strict=True)), default=0.0)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
