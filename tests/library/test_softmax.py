"""Softmax and its relatives on every backend: rows of all kinds, one read where the sum runs beside the maximum."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cuda_on_host
import programs as p
import pytest
import softmax_rows
import torch

from fusion_advisor.library.build import backend as backend_of
from fusion_advisor.library.online import online_sums
from fusion_advisor.library.source import Header, Tuning

HERE = Path(__file__).parent
CASES = {name: rest for name, *rest in softmax_rows.programs()}
HEADER = Header(title="case", summary="a test", origin="a test")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++, and there is no g++")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs kernels, and this machine has no CUDA device")


def render(backend, program):
    return backend_of(backend).render(program, HEADER, tuning=Tuning(), fast_math=False)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    command = [sys.executable, str(HERE / "softmax_rows.py"), str(tmp_path_factory.mktemp("kernels"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [name for name in CASES if "bfloat16" not in name])
def test_triton(interpreted, name):
    assert not interpreted[name]


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_cpp(tmp_path, name):
    function, both, tensors, program = CASES[name]
    out = softmax_rows.result_like(function, both)
    backend_of("cpp").build(render("cpp", program), tmp_path / "k.cpp").bind(program)(*tensors, out)
    assert not softmax_rows.complaint(function, both, out)


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_cuda_arithmetic_on_the_host(tmp_path, name):
    function, both, tensors, program = CASES[name]
    out = softmax_rows.result_like(function, both)
    cuda_on_host.run(render("cuda", program), program, tensors, [out], tmp_path)
    assert not softmax_rows.complaint(function, both, out, is_serial=both[0].shape[1] == softmax_rows.COLS[-1])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("name", CASES)
def test_on_the_device(tmp_path, name, backend):
    function, both, tensors, program = CASES[name]
    rendered = render(backend, program)
    out = softmax_rows.result_like(function, both).cuda()
    launcher = backend_of(backend).build(rendered, tmp_path / f"{rendered.entry}{rendered.suffix}").bind(program)
    launcher(*(tensor.cuda() for tensor in tensors), out)
    assert not softmax_rows.complaint(function, both, out.cpu())


@pytest.mark.parametrize(
    ("backend", "loop"),
    [("triton", "for start in range("), ("cuda", "for (index_t start = 0;"), ("cpp", "for (int64_t start = 0;")],
)
def test_a_log_sum_of_exponentials_reads_a_wide_row_once(backend, loop):
    assert render(backend, p.logsumexp(4, 20000)).source.count(loop) == 1


@pytest.mark.parametrize(("backend", "loop"), [("triton", "for start in range("), ("cuda", "for (index_t start = 0;")])
def test_softmax_reads_a_wide_row_twice(backend, loop):
    assert render(backend, p.softmax(4, 20000)).source.count(loop) == 2


@needs_compiler
@pytest.mark.parametrize("backend", ["cpp", "cuda"])
def test_a_product_is_rounded_once_for_the_maximum_and_what_it_is_taken_from(tmp_path, backend, monkeypatch):
    """x·c − max(x·c) is 0 at the maximum, also where the compiler contracts products as nvcc does."""
    monkeypatch.setattr(cuda_on_host, "OPTIMISE", ("-O2", "-march=native", "-ffp-contract=fast"))
    x = torch.full((4, 40), 1.2345e27) * torch.tensor([[1.0], [-1.0], [3.7], [1e-20]])
    out = torch.zeros_like(x)
    program = p.softmax(4, 40, scale=0.3)
    rendered = render(backend, program)
    if backend == "cuda":
        cuda_on_host.run(rendered, program, [x], [out], tmp_path)
    else:
        backend_of(backend).build(rendered, tmp_path / "k.cpp").bind(program)(x, out)
    torch.testing.assert_close(out, torch.full_like(x, 1 / 40), rtol=1e-6, atol=0)


def test_triton_contracts_no_product_into_the_difference_from_its_maximum():
    source = render("triton", p.softmax(4, 40, scale=0.3)).source
    assert "product = tl.fma(x, 0.3, 0.0)" in source
    assert "tl.fma" not in render("triton", p.add_layernorm()).source.split("def fa_case")[1]


def test_the_sum_must_belong_to_its_maximum():
    program = p.softmax()
    assert len(online_sums(program)) == 1
    assert len(online_sums(p.logsumexp())) == 1
    lowest = tuple(replace(v, op="reduce_min") if v.op == "reduce_max" else v for v in program.values)
    assert not online_sums(replace(program, values=lowest))
    # The maximum of what was loaded does not bound what is summed.
    other = tuple(replace(v, args=(0,)) if v.op == "reduce_max" else v for v in program.values)
    assert not online_sums(replace(program, values=other))
    shifted = p.logsumexp()
    by_one = tuple(replace(v, constant=1.0) if v.constant == 0.0 else v for v in shifted.values)
    assert not online_sums(replace(shifted, values=by_one))
