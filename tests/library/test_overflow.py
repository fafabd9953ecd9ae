"""Exponentials around their overflow, on every backend: no NaN, no infinity that is not due, and right to a few units."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cuda_on_host
import overflow
import pytest
import torch

from fusion_advisor.library.build import backend as backend_of
from fusion_advisor.library.source import Header, Tuning

HERE = Path(__file__).parent
CASES = {name: rest for name, *rest in overflow.programs()}
HEADER = Header(title="case", summary="a test", origin="a test")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++, and there is no g++")


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    command = [sys.executable, str(HERE / "overflow.py"), str(tmp_path_factory.mktemp("kernels"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mode", ["", "-fast"])
@pytest.mark.parametrize("name", CASES)
def test_triton(interpreted, name, mode):
    assert not interpreted[name + mode]


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_cpp(tmp_path, name):
    function, inputs, program = CASES[name]
    rendered = backend_of("cpp").render(program, HEADER, tuning=Tuning(), fast_math=False)
    out = torch.zeros_like(inputs[0])
    backend_of("cpp").build(rendered, tmp_path / "k.cpp").bind(program)(*inputs, out)
    assert not overflow.complaint(function, inputs, out)


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_cuda_arithmetic_on_the_host(tmp_path, name):
    function, inputs, program = CASES[name]
    rendered = backend_of("cuda").render(program, HEADER, tuning=Tuning(), fast_math=False)
    out = torch.zeros_like(inputs[0])
    cuda_on_host.run(rendered, program, inputs, [out], tmp_path)
    assert not overflow.complaint(function, inputs, out)
