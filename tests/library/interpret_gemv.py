"""Run the Triton GEMV kernels in the interpreter and print name → complaint as JSON; a process of its own, see test_gemv.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
from gemv_cases import HEADER, complaint, problems, tensors

from fusion_advisor.library.gemv import candidates
from fusion_advisor.library.gemv_triton import GemvTriton


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
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
