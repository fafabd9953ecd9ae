"""Run the Triton GEMV kernels in the interpreter, in a process of its own; print name → complaint as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from fusion_advisor.autotune.select_gemm import launcher_for
from fusion_advisor.codegen.gemm.problem import around, candidates
from fusion_advisor.codegen.gemm.triton import GemvTriton
from tests.kernel_cases.gemv_cases import HEADER, complaint, problems, surrounded, tensors


def main(folder):
    found = {}
    for name, problem in problems().items():
        for config in candidates(problem, ("triton",)):
            rendered = GemvTriton().render(problem, HEADER, config=config)
            launch = GemvTriton().build(rendered, Path(folder) / f"{rendered.entry}.py").bind(problem, config)
            for kind in ("normal", "special"):
                given = tensors(problem, kind)
                # The interpreter cuts bfloat16 off where a GPU rounds it: it stores float32, and torch rounds.
                out = torch.full((problem.m, problem.n), 3.0)
                launch(*given, out)
                found[f"{name} {config.text} {kind}"] = complaint(problem, given, out.to(given[0].dtype))
    for name, problem in surrounded().items():
        config = around(problem, "triton")
        launch = launcher_for(problem, config, header=HEADER, folder=Path(folder))
        for kind in ("normal", "special"):
            given = tensors(problem, kind)
            out = torch.full((problem.m, problem.n), 3.0, dtype=given[0].dtype)
            launch(*given, out)
            found[f"{name} {config.text} {kind}"] = complaint(problem, given, out)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
