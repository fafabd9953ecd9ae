"""Softmax and its relatives on every backend: rows of all kinds, one read where the sum runs beside the maximum."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.common.online_softmax import online_sums
from fusion_advisor.codegen.registry import backend as backend_of
from tests.kernel_cases import cuda_on_host, softmax_rows
from tests.kernel_cases import programs as p
from tests.kernel_cases.cpp_at_once import build_all

HERE = Path(__file__).parents[1] / "kernel_cases"
HEADER = Header(title="case", summary="a test", origin="a test")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++, and there is no g++")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs kernels, and this machine has no CUDA device")


def render(backend, program):
    return backend_of(backend).render(program, HEADER, tuning=Tuning(), fast_math=False)


def rendered_by(backend, dtypes):
    """(name, function, both inputs, operands, program, source, an output to fill), of every function and width."""
    found = []
    for name, function, both, tensors, program in softmax_rows.programs(dtypes):
        out = softmax_rows.result_like(function, both)
        found.append((name, function, both, tensors, program, render(backend, program), out))
    assert len(found) >= 9
    return found


def complaints(rows, *, is_serial=False):
    found = {}
    for name, function, both, *_, out in rows:
        is_wide = both[0].shape[1] == softmax_rows.COLS[-1]
        found[name] = softmax_rows.complaint(function, both, out, is_serial=is_serial and is_wide)
    return {name: problem for name, problem in found.items() if problem}


@pytest.mark.slow
def test_triton_in_the_interpreter(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    command = [sys.executable, str(HERE / "softmax_rows.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(softmax_rows.WIDE) + 3 * len(softmax_rows.FUNCTIONS)
    assert not {name: problem for name, problem in found.items() if problem}


@needs_compiler
@pytest.mark.parametrize("dtype", softmax_rows.DTYPES)
def test_cpp(tmp_path, dtype):
    rows = rendered_by("cpp", (dtype,))
    kernels = build_all([rendered for *_, rendered, _ in rows], tmp_path)
    for _, _, _, tensors, program, rendered, out in rows:
        kernels[rendered.entry].bind(program)(*tensors, out)
    assert not complaints(rows)


@needs_compiler
@pytest.mark.parametrize("dtype", softmax_rows.DTYPES)
def test_cuda_arithmetic_on_the_host(tmp_path, dtype):
    rows = rendered_by("cuda", (dtype,))
    cuda_on_host.run_all(
        [
            cuda_on_host.Launch(rendered=rendered, program=program, inputs=tensors, outputs=[out])
            for _, _, _, tensors, program, rendered, out in rows
        ],
        tmp_path,
    )
    assert not complaints(rows, is_serial=True)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_on_the_device(tmp_path, backend):
    rows = [(*row[:-1], row[-1].cuda()) for row in rendered_by(backend, softmax_rows.DTYPES)]
    for _, _, _, tensors, program, rendered, out in rows:
        launcher = backend_of(backend).build(rendered, tmp_path / f"{rendered.entry}{rendered.suffix}").bind(program)
        launcher(*(tensor.cuda() for tensor in tensors), out)
    assert not complaints([(*row[:-1], row[-1].cpu()) for row in rows])


@pytest.mark.parametrize(
    ("backend", "loop"),
    [("triton", "for start in "), ("cuda", "for (index_t start = "), ("cpp", "for (int64_t start = 0;")],
)
def test_a_log_sum_of_exponentials_reads_a_wide_row_once(backend, loop):
    assert render(backend, p.logsumexp(4, 20000)).source.count(loop) == 1


@pytest.mark.parametrize(("backend", "loop"), [("triton", "for start in "), ("cuda", "for (index_t start = ")])
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
