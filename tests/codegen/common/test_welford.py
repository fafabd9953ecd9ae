"""Sums and the squares about their mean, accumulated together: rows of all kinds, any number of threads, one read less."""

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

from fusion_advisor.codegen.common.arguments import schedule
from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.common.welford import moments
from fusion_advisor.codegen.registry import backend as backend_of
from tests.kernel_cases import moments_rows, simt_on_host
from tests.kernel_cases import programs as p

HERE = Path(__file__).parents[2] / "kernel_cases"
CASES, COLS = moments_rows.CASES, moments_rows.COLS
HEADER = Header(title="case", summary="a test", origin="a test")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++, and there is no g++")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs kernels, and this machine has no CUDA device")


def render(backend, program):
    return backend_of(backend).render(program, HEADER, tuning=Tuning(), fast_math=False)


@pytest.mark.slow
def test_triton(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    command = [sys.executable, str(HERE / "moments_rows.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {f"{name} {cols}": "" for name, cols in moments_rows.INTERPRETED}


@needs_compiler
@pytest.mark.parametrize(
    ("name", "cols", "threads", "packs", "staged"),
    [
        ("layernorm-float32", 17408, 128, 2, 17408),  # every thread as much, and the row is held
        ("layernorm-bfloat16", COLS, 96, 2, 5008),  # some less, and of one step a part is held
        ("layernorm-bfloat16", COLS, 256, 2, 0),
        ("std-float32", COLS, 1024, 5, 0),  # one step; some threads have nothing
        ("std-float32", 16387, 128, 4, 0),  # rows start at any address
        ("mean_where_no_variance-float32", COLS, 64, 4, 0),
    ],
)
def test_cuda_threads_on_the_host(tmp_path, name, cols, threads, packs, staged):
    function, dtype = CASES[name]
    both = moments_rows.inputs(dtype, cols)
    program, tensors, out = moments_rows.lowered(function, both)
    scalars = [value for _, value in schedule(program, flatten_rows=True).arguments]
    width = 16 // dtype.itemsize
    macros = {"THREADS": threads, "ROWS": 1, "PACKS": packs, "VEC": width, "FULL": int(cols % (threads * packs * width) == 0)}
    macros["STAGED"] = staged
    rendered = render("cuda", program)
    simt_on_host.run(rendered, [*tensors, out], len(both[0]), threads, tmp_path, scalars=scalars, macros=macros.items())
    assert not moments_rows.complaint(function, both, out)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("name", CASES)
def test_on_the_device(tmp_path, name, backend):
    function, dtype = CASES[name]
    both = moments_rows.inputs(dtype)
    program, tensors, out = moments_rows.lowered(function, both)
    rendered = render(backend, program)
    launcher = backend_of(backend).build(rendered, tmp_path / f"{rendered.entry}{rendered.suffix}").bind(program)
    on_device = out.cuda()
    launcher(*(tensor.cuda() for tensor in tensors), on_device)
    assert not moments_rows.complaint(function, both, on_device.cpu())


@pytest.mark.parametrize(("backend", "loop"), [("triton", "for start in "), ("cuda", "for (index_t start = ")])
def test_a_layernorm_reads_a_wide_row_twice(backend, loop):
    assert render(backend, p.add_layernorm(4, 20000)).source.count(loop) == 2


@pytest.mark.parametrize("backend", ["triton", "cuda", "cpp"])
def test_rows_in_registers_and_on_the_cpu_keep_two_plain_sums(backend):
    cols = 20000 if backend == "cpp" else 4096
    source = render(backend, p.add_layernorm(4, cols)).source
    assert "oments" not in source
    assert "squares_about" not in source


def test_the_squares_must_be_about_the_mean_of_what_is_summed():
    program = p.add_layernorm()
    (found,) = moments(program)
    values = program.values
    assert values[found.element].op == "add"
    assert values[found.mean].args[0] == found.total

    def changed(number, **fields):
        return replace(program, values=tuple(replace(v, **fields) if n == number else v for n, v in enumerate(values)))

    centred = next(n for n, v in enumerate(values) if v.op == "sub")
    square = next(n for n, v in enumerate(values) if v.op == "mul" and v.args == (centred, centred))
    size = next(n for n, v in enumerate(values) if v.op == "size")
    assert not moments(changed(found.total, op="reduce_max"))
    assert not moments(changed(found.total, args=(0,)))  # the mean of something else
    assert not moments(changed(square, args=(centred, 0)))
    assert not moments(changed(centred, op="add"))
    assert not moments(changed(size, dim=0))  # the rows are counted
    assert not moments(changed(size, op="const", constant=24.0))  # another width shares the kernel
    assert not moments(p.rmsnorm())
