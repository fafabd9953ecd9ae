"""Run the ops of special_cases.py through Triton's interpreter; print op and dtype → what differs from eager, as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Tuning
from fusion_advisor.codegen.triton.backend import TritonBackend
from tests.hostile.special_cases import DTYPES, NAMES, function, inputs, problem, result_for
from tests.kernel_cases.lowered import lower_function


def main(folder):
    backend, found = TritonBackend(), {}
    header = Header(title="case", summary="a test", origin="a test")
    for name in NAMES:
        for dtype in DTYPES:
            given = inputs(name, DTYPES[dtype])
            lowered, ops = lower_function(function(name), *given)
            try:
                rendered = backend.render(lowered.program, header, tuning=Tuning(), fast_math=False)
            except KernelBuildFailed:
                continue
            kernel = backend.build(rendered, Path(folder) / f"{name.replace('.', '_')}_{dtype}.py")
            arguments, output = result_for(lowered, ops, given, stores_float32=True)
            kernel.bind(lowered.program)(*arguments, output)
            found[f"{name} {dtype}"] = problem(output, name, DTYPES[dtype], is_gpu=True)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
