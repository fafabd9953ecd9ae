"""The ops of special_cases.py in Triton and CUDA C++, on zeros of both signs, infinities, NaN, subnormals and the range's ends.

Triton runs in its interpreter and CUDA C++ on the host: what is tested there is what the kernels are made of, helpers among them.
The functions of both machines' libraries (exp, log, sin …) are numpy's and the C library's there. A GPU flushes subnormal
numbers in some of its own; on one the same table is compared with its eager.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Tuning
from fusion_advisor.codegen.cuda.backend import CudaBackend
from fusion_advisor.codegen.triton.backend import TritonBackend
from tests.hostile.special_cases import DTYPES, NAMES, function, inputs, problem, result_for
from tests.kernel_cases.cuda_on_host import Launch, run_all
from tests.kernel_cases.lowered import lower_function

HERE = Path(__file__).parent
HEADER = Header(title="case", summary="a test", origin="a test")
KEYS = [(name, dtype) for name in NAMES for dtype in DTYPES]
NOT_IN_TRITON = {"pow_1.5 float64"}


@pytest.mark.slow
def test_triton_in_the_interpreter(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "-W", "ignore", str(HERE / "interpret_special.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {f"{name} {dtype}" for name, dtype in KEYS} - NOT_IN_TRITON
    assert {key: words for key, words in found.items() if words} == {}


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles CUDA C++ for the host, and there is no g++")
def test_cuda_on_the_host(tmp_path):
    launches = []
    for name, dtype in KEYS:
        given = inputs(name, DTYPES[dtype])
        lowered, ops = lower_function(function(name), *given)
        rendered = CudaBackend().render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
        arguments, output = result_for(lowered, ops, given)
        launches.append(Launch(rendered=rendered, program=lowered.program, inputs=arguments, outputs=(output,)))
    run_all(launches, tmp_path)
    results = {key: launch.outputs[0] for key, launch in zip(KEYS, launches, strict=True)}
    found = {key: problem(result, key[0], DTYPES[key[1]], is_gpu=True) for key, result in results.items()}
    assert {key: words for key, words in found.items() if words} == {}


@pytest.mark.parametrize(("name", "dtype"), [key for key in KEYS if f"{key[0]} {key[1]}" not in NOT_IN_TRITON])
def test_no_triton_kernel_leaves_the_sign_of_a_zero_to_the_compiler(name, dtype):
    # Triton 3.6 on a GPU takes -0.0 for 0.0 and computes -x as 0 - x; its interpreter does neither.
    lowered, _ = lower_function(function(name), *inputs(name, DTYPES[dtype]))
    source = TritonBackend().render(lowered.program, HEADER, tuning=Tuning(), fast_math=False).source
    kernel = ast.parse(source.split("# ---- launch")[0]).body[-1]
    assert isinstance(kernel, ast.FunctionDef)
    negated = [node.operand for node in ast.walk(kernel) if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)]
    unsafe = [node for node in negated if not (isinstance(node, ast.Constant) and node.value != 0)]
    assert [ast.unparse(node) for node in unsafe] == []


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [TritonBackend, CudaBackend])
@pytest.mark.parametrize(("name", "dtype"), KEYS)
def test_a_gpu_gives_what_its_eager_gives(backend, name, dtype, tmp_path):
    given = [tensor.cuda() for tensor in inputs(name, DTYPES[dtype])]
    lowered, ops = lower_function(function(name), *given)
    if backend is TritonBackend and f"{name} {dtype}" in NOT_IN_TRITON:
        with pytest.raises(KernelBuildFailed):
            backend().render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
        return
    rendered = backend().render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
    arguments, output = result_for(lowered, ops, given)
    backend().build(rendered, tmp_path / f"kernel{rendered.suffix}").bind(lowered.program)(*arguments, output)
    want = function(name)(*given)
    # The device's eager chooses between zeros as its kernels do; either of the two may flush subnormal arguments and results.
    tiny = torch.finfo(DTYPES[dtype]).smallest_normal
    touched = [*given, want] if want.is_floating_point() else given
    is_subnormal = torch.stack([(tensor.abs() < tiny) & (tensor != 0) for tensor in touched]).any(0)
    assert problem(torch.where(is_subnormal, want, output.to(want.dtype)), name, DTYPES[dtype], device="cuda") == ""
