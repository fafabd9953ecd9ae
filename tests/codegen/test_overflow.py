"""Exponentials around their overflow, on every backend: no NaN, no infinity that is not due, and right to a few units."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.registry import backend as backend_of
from tests.kernel_cases import cuda_on_host, overflow
from tests.kernel_cases.cpp_at_once import build_all

HERE = Path(__file__).parents[1] / "kernel_cases"
HEADER = Header(title="case", summary="a test", origin="a test")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++, and there is no g++")


def rendered_by(backend, dtype):
    """(name, function, inputs, program, source, an output to fill), of every function."""
    found = []
    for name, function, inputs, program in overflow.programs((dtype,)):
        rendered = backend_of(backend).render(program, HEADER, tuning=Tuning(), fast_math=False)
        found.append((name, function, inputs, program, rendered, torch.zeros_like(inputs[0])))
    assert len(found) > 20
    return found


def complaints(rows):
    found = {name: overflow.complaint(function, inputs, out) for name, function, inputs, _, _, out in rows}
    return {name: problem for name, problem in found.items() if problem}


@pytest.mark.slow
def test_triton_in_the_interpreter(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    command = [sys.executable, str(HERE / "overflow.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 2 * len(overflow.DTYPES) * len(overflow.functions())
    assert not {name: problem for name, problem in found.items() if problem}


@needs_compiler
@pytest.mark.parametrize("dtype", overflow.DTYPES)
def test_cpp(tmp_path, dtype):
    rows = rendered_by("cpp", dtype)
    kernels = build_all([rendered for *_, rendered, _ in rows], tmp_path)
    for _, _, inputs, program, rendered, out in rows:
        kernels[rendered.entry].bind(program)(*inputs, out)
    assert not complaints(rows)


@needs_compiler
@pytest.mark.parametrize("dtype", overflow.DTYPES)
def test_cuda_arithmetic_on_the_host(tmp_path, dtype):
    rows = rendered_by("cuda", dtype)
    cuda_on_host.run_all(
        [
            cuda_on_host.Launch(rendered=rendered, program=program, inputs=inputs, outputs=[out])
            for _, _, inputs, program, rendered, out in rows
        ],
        tmp_path,
    )
    assert not complaints(rows)
