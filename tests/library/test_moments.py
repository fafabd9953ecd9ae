"""Sums and the squares about their mean, reduced together: rows of all kinds, any number of threads, one read of a wide row."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cuda_on_host
import moments_rows
import programs as p
import pytest
import simt_on_host
import torch

from fusion_advisor.library.build import backend as backend_of
from fusion_advisor.library.moments import moments
from fusion_advisor.library.schedule import schedule
from fusion_advisor.library.source import Header, Tuning

HERE = Path(__file__).parent
CASES = {name: rest for name, *rest in moments_rows.programs()}
HEADER = Header(title="case", summary="a test", origin="a test")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++, and there is no g++")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs kernels, and this machine has no CUDA device")


def render(backend, program):
    return backend_of(backend).render(program, HEADER, tuning=Tuning(), fast_math=False)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    command = [sys.executable, str(HERE / "moments_rows.py"), str(tmp_path_factory.mktemp("kernels"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_recognised(name):
    assert len(moments(CASES[name][3])) == 1


@pytest.mark.parametrize("name", [name for name in CASES if "bfloat16" not in name])
def test_triton(interpreted, name):
    assert not interpreted[name]


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_cuda_arithmetic_on_the_host(tmp_path, name):
    function, both, tensors, program = CASES[name]
    out = moments_rows.result_like(function, both)
    cuda_on_host.run(render("cuda", program), program, tensors, [out], tmp_path)
    assert not moments_rows.complaint(function, both, out, is_serial=both[0].shape[1] > 24)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "cols", "threads", "packs"),
    [
        ("layernorm", 1536, 96, 4),  # every thread holds as much
        ("layernorm", 128, 32, 1),  # one warp
        ("layernorm", 1532, 96, 4),  # one thread holds less
        ("layernorm", 100, 32, 1),  # one warp, some threads hold nothing
        ("layernorm", 40, 96, 1),  # some warps hold nothing
        ("layernorm", 17408, 128, 1),  # in a loop, every thread as much
        ("layernorm", 16400, 96, 2),  # in a loop, some less
        ("var", 1536, 128, 3),
        ("mean_where_no_variance", 1536, 128, 3),
        ("mean_where_no_variance", 1000, 96, 3),
        ("mean_where_no_variance", 16400, 64, 4),
    ],
)
def test_cuda_threads_on_the_host(tmp_path, name, cols, threads, packs):
    function, both = moments_rows.FUNCTIONS[name], moments_rows.inputs(torch.float32, cols)
    lowered = next(moments_rows.lower_graph(moments_rows.trace(moments_rows.plain(function), list(both)), ("x", "weight")))
    out = moments_rows.result_like(function, both)
    scalars = [value for _, value in schedule(lowered.program, flatten_rows=True).arguments]
    macros = {"THREADS": threads, "ROWS": 1, "PACKS": packs, "VEC": 4, "FULL": int(cols % (threads * packs * 4) == 0)}
    tensors = [*(both[n] for n in lowered.inputs), out]
    rendered = render("cuda", lowered.program)
    simt_on_host.run(rendered, tensors, len(both[0]), threads, tmp_path, scalars=scalars, macros=macros.items())
    assert not moments_rows.complaint(function, both, out)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("name", CASES)
def test_on_the_device(tmp_path, name, backend):
    function, both, tensors, program = CASES[name]
    rendered = render(backend, program)
    out = moments_rows.result_like(function, both).cuda()
    launcher = backend_of(backend).build(rendered, tmp_path / f"{rendered.entry}{rendered.suffix}").bind(program)
    launcher(*(tensor.cuda() for tensor in tensors), out)
    assert not moments_rows.complaint(function, both, out.cpu())


@pytest.mark.parametrize(("backend", "loop"), [("triton", "for start in range("), ("cuda", "for (index_t start = 0;")])
def test_a_layernorm_reads_a_wide_row_twice(backend, loop):
    assert render(backend, p.add_layernorm(4, 20000)).source.count(loop) == 2


def test_threads_wait_for_each_other_once():
    body = render("cuda", p.add_layernorm()).source.split("fa_case")[1]
    assert body.count("row_moments<") == 1
    assert "row_reduce" not in body
    assert render("cuda", p.add_layernorm()).source.count("__syncthreads") == 1


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_variance_alone_leaves_no_unused_mean(backend):
    source = render(backend, CASES["var-float32-16400"][3]).source.split("fa_case")[1] if backend == "cuda" else ""
    assert "_mean =" not in source
    assert "x_sum =" not in source


def test_the_squares_must_be_about_the_mean_of_what_is_summed():
    program = p.add_layernorm()
    (found,) = moments(program)
    values = program.values
    assert values[found.element].op == "add"

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
