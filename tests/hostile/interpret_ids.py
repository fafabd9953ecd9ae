"""Run the cases of id_cases.py through Triton's interpreter; print name and position → whether it raised, and what it gave."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from id_cases import CASES, WRONG, answer, inputs

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.triton.backend import TritonBackend
from tests.kernel_cases.evaluate import allocate
from tests.kernel_cases.lowered import lower_function


def _run(name, kernel, lowered, ops, position):
    at = [op.index for op in ops if op.role not in ("op", "output")]
    given = inputs(name, position)
    outputs = allocate(lowered.program) if not lowered.written else [given[0].flatten()]
    try:
        kernel.bind(lowered.program)(*(given[at.index(root)].flatten() for root in lowered.inputs), *outputs)
    except Exception as error:  # the interpreter wraps the assertion's in one of its own
        if "position out of range" not in str(error):
            raise
        return "raised"
    want = answer(name, position)
    want = given[0] if isinstance(want, Exception) else want
    return "same" if torch.allclose(outputs[0].to(want.dtype), want.flatten(), rtol=1e-2, atol=1e-2) else "differs"


def main(folder):
    found = {}
    for name in CASES:
        lowered, ops = lower_function(CASES[name][0], *inputs(name))
        rendered = TritonBackend().render(
            lowered.program, Header(title=name, summary=name, origin="a test"), tuning=Tuning(), fast_math=False
        )
        kernel = TritonBackend().build(rendered, Path(folder) / f"{name}.py")
        for key, position in {"right": 18, **WRONG}.items():
            found[f"{name} {key}"] = _run(name, kernel, lowered, ops, position)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
