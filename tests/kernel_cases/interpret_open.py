"""Render each open case once, run it in Triton's interpreter at all its sizes, and print name → distance as JSON.

A process of its own: the interpreter must be switched on before triton is imported. Takes a folder and names; no names are all.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from fusion_advisor.codegen.common.horizontal_fusion import calls_of
from fusion_advisor.codegen.common.interface import Header
from fusion_advisor.codegen.standalone import with_launcher
from fusion_advisor.codegen.triton.backend import TritonBackend, load_source
from tests.kernel_cases.cases import distance
from tests.kernel_cases.evaluate import allocate, evaluate
from tests.kernel_cases.open_cases import CASES


def sizes_of(launch, program):
    """The keywords of a file's own ``launch``."""
    calls = calls_of(program, flatten_rows=False)
    values = {name: value for call in calls for name, value in call.arguments}
    for number, call in enumerate(calls, start=1):
        values.setdefault(f"size0_of_{number}" if call.function else "size0", call.plan.program.dims[0])
    wanted = [one.name for one in inspect.signature(launch).parameters.values() if one.kind is inspect.Parameter.KEYWORD_ONLY]
    return {name: values[name] for name in wanted}


def main(folder, *names):
    backend, found = TritonBackend(), {}
    for name in names or CASES:
        case = CASES[name]
        first, *elsewhere = (case.at(*sizes) for sizes in case.rendered)
        header = Header(title="case", summary=name, origin="a test")
        rendered = backend.render(first, header, tuning=case.tuning, fast_math=False, elsewhere=elsewhere)
        kernel = backend.build(rendered, Path(folder) / f"{name}.py")
        whole = with_launcher(rendered, first)
        own_launch = load_source(replace(whole, source=whole.text), Path(folder) / f"{name}_file.py").launch
        assert kernel.compile_for(case.at(*sizes) for sizes in case.launched) <= len(case.launched)
        for sizes in case.launched:
            program = case.at(*sizes)
            tensors = allocate(program, is_output=False, generator=torch.Generator().manual_seed(0))
            tensors = [torch.cat([one, one + 1]) for one in tensors]  # `allocate` does not see what quotients add to an address
            oracle = evaluate(program, *tensors)
            for kind in ("bound", "file"):
                outputs = allocate(program)
                if kind == "bound":
                    kernel.bind(program)(*tensors, *outputs)
                else:
                    own_launch(*tensors, *outputs, **sizes_of(own_launch, program))
                far = [distance(name, *pair) for pair in zip(outputs, oracle, strict=True)]
                found[f"{name} {kind} {sizes}"] = max(far)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
