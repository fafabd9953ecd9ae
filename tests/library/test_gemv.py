"""Linear layers on few rows: every form against fp64 with eager's own error beside it, and who is chosen when.

CUDA kernels run on the host, all threads of a block (see simt_on_host.py), Triton's in its interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import simt_on_host
import torch
from gemv_cases import EPILOGUES, HEADER, complaint, problems, tensors

from fusion_advisor.library import gemv_cuda, gemv_triton
from fusion_advisor.library.gemv import CUBLAS, GemvConfig, GemvProblem, candidates, default_config, fits, refusal
from fusion_advisor.library.gemv_cuda import GemvCuda
from fusion_advisor.library.gemv_torch import torch_launcher
from fusion_advisor.library.gemv_triton import GemvTriton
from fusion_advisor.library.nvrtc import find_nvcc
from fusion_advisor.library.source import KernelBuildFailed

HERE = Path(__file__).parent
PROBLEMS = problems()
CUDA = [(name, config) for name, problem in PROBLEMS.items() for config in candidates(problem, ("cuda",))]
HAS_NVRTC = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.core") is not None
needs_gpp = pytest.mark.skipif(shutil.which("g++") is None, reason="runs kernels on the host, and there is no g++")


def on_host(problem, config, given, folder):
    rendered = GemvCuda().render(problem, HEADER, config=config)
    out = torch.full((problem.m, problem.n), 3.0, dtype=given[0].dtype)
    simt_on_host.run(rendered, [*given, out], -(-problem.n // config.rows), 32 * config.warps, folder)
    return out


@needs_gpp
@pytest.mark.parametrize(("name", "config"), CUDA, ids=lambda item: getattr(item, "text", item))
def test_cuda_on_the_host(tmp_path, name, config):
    for kind in ("normal", "special"):
        given = tensors(PROBLEMS[name], kind)
        assert not complaint(PROBLEMS[name], given, on_host(PROBLEMS[name], config, given, tmp_path)), kind


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    command = [sys.executable, str(HERE / "interpret_gemv.py"), str(tmp_path_factory.mktemp("kernels"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_triton_in_the_interpreter(interpreted):
    assert len(interpreted) > 100
    assert not {name: problem for name, problem in interpreted.items() if problem}
