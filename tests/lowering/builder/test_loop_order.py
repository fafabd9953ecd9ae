"""Rows that share a row of a mask or bias are worked on one after another; where, and that every backend still computes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.registry import backend as backend_of
from fusion_advisor.codegen.triton.backend import compile_for
from fusion_advisor.library.discover import load_kernel
from fusion_advisor.library.match import find_match, structure
from fusion_advisor.library.patterns import kernel_patterns
from fusion_advisor.lowering.builder.loop_order import share_rows
from tests.kernel_cases import cuda_on_host
from tests.kernel_cases.evaluate import evaluate
from tests.kernel_cases.lowered import check, lower_function
from tests.kernel_cases.programs import Build
from tests.kernel_cases.row_order_cases import CASES, make_inputs

HERE = Path(__file__).parents[2] / "kernel_cases"
HEADER = Header(title="case", summary="a test", origin="a test")
BF16, BOOL = torch.bfloat16, torch.bool
WIDE = 1024
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++, and there is no g++")


def additive(scores, *biases):
    for bias in biases:
        scores = scores + bias
    return torch.softmax(scores, -1)


def normed(x, added):
    return torch.nn.functional.layer_norm(x + added, x.shape[-1:])


def program_of(function, *shapes, dtype=BF16):
    return lower_function(function, *(torch.empty(shape, dtype=dtype) for shape in shapes))[0].program


@pytest.mark.parametrize(
    ("shapes", "dims"),
    [
        (((1, 4, 6, WIDE), (1, 1, 6, WIDE)), (6, 4, WIDE)),
        (((3, 4, 6, WIDE), (3, 1, 6, WIDE)), (3, 6, 4, WIDE)),
        (((3, 4, 6, WIDE), (1, 1, 6, WIDE)), (6, 12, WIDE)),  # batch and heads are one dim to all
        (((3, 4, 6, WIDE), (4, 6, WIDE)), (24, 3, WIDE)),
        (((3, 4, 6, WIDE), (3, 1, 6, WIDE), (4, 6, WIDE)), (6, 4, 3, WIDE)),  # more bytes are broadcast over the batch
        (((6, 4, 6, WIDE), (6, 1, 6, WIDE), (4, 6, WIDE)), (6, 6, 4, WIDE)),  # over the heads: 6, queries, heads
        (((3, 4, 6, WIDE), (3, 1, 1, WIDE)), (3, 24, WIDE)),  # the shared dims are innermost already
        (((3, 4, 6, WIDE), (1, 1, 1, WIDE)), (72, WIDE)),  # one row for all
        (((3, 4, 6, WIDE), (4, 1, 1)), (3, 4, 6, WIDE)),  # a number for each head, no row
        (((3, 4, 6, WIDE // 4), (3, 1, 6, WIDE // 4)), (3, 4, 6, WIDE // 4)),  # rows of 512 bytes
        (((1, 4, 1, WIDE), (1, 1, 1, WIDE)), (4, WIDE)),  # one query
    ],
)
def test_the_dim_that_most_bytes_are_broadcast_over_is_innermost(shapes, dims):
    program = program_of(additive, *shapes)
    assert program.dims == dims


def test_what_neighbours_share_is_read_within_few_rows():
    """How far apart, in rows of the walk, two reads of one row of an operand are at most."""
    shapes = (6, 4, 8, WIDE), (6, 1, 8, WIDE), (4, 8, WIDE)
    program = program_of(additive, *shapes)
    loads = [value for value in program.values if value.op == "load"]
    for load, rows in zip(loads, (0, 6 * 4, 6 * 4), strict=True):
        seen: dict[int, int] = {}
        apart = 0
        for row in range(prod(program.dims[:-1])):
            rest, address = row, 0
            for size, stride in zip(reversed(program.dims[:-1]), reversed(load.strides[:-1]), strict=True):
                rest, place = divmod(rest, size)
                address += place * stride
            apart = max(apart, row - seen.get(address, row))
            seen[address] = row
        assert apart < max(rows, 1)


def test_a_view_of_heads_beside_queries_needs_no_change():
    scores = torch.empty(2, 6, 4, WIDE, dtype=BF16).transpose(1, 2)
    program = lower_function(additive, scores, torch.empty(2, 1, 6, WIDE, dtype=BF16))[0].program
    assert program.dims == (2, 6, 4, WIDE)


def test_rows_in_pieces_stay_in_memory_order():
    scores = torch.empty(4, WIDE, 6, dtype=BF16).transpose(1, 2)  # a row's elements are 6 apart
    program = lower_function(additive, scores, torch.empty(1, 6, WIDE, dtype=BF16))[0].program
    assert program.dims == (4, 6, WIDE)


def test_pointwise_nests_and_gathered_tables_are_left_alone():
    assert program_of(lambda x, y: x + y, (4, 6, WIDE), (6, WIDE)).dims == (4, 6 * WIDE)
    ids, places = torch.zeros(3, 5, dtype=torch.int64), torch.arange(5)[None]
    words, positions = torch.empty(9, WIDE, dtype=BF16), torch.empty(5, WIDE, dtype=BF16)

    def embedded(ids, places, words, positions):
        functional = torch.nn.functional
        return functional.layer_norm(functional.embedding(ids, words) + functional.embedding(places, positions), (WIDE,))

    assert lower_function(embedded, ids, places, words, positions)[0].program.dims == (3, 5, WIDE)


def test_positions_added_before_a_norm_are_shared_by_the_batch():
    assert program_of(normed, (3, 5, WIDE), (5, WIDE)).dims == (5, 3, WIDE)
    assert program_of(normed, (3, 5, WIDE), (3, 1, WIDE)).dims == (3, 5, WIDE)


def test_it_is_done_once():
    program = program_of(additive, (3, 4, 6, WIDE), (3, 1, 6, WIDE))
    assert share_rows(program) is program


def test_the_library_kernel_is_found_in_either_order():
    patterns = tuple(kernel_patterns(load_kernel("masked_softmax_additive").spec))

    def attention(scores, mask):
        return torch.softmax(scores / 8 + mask, -1)

    texts = set()
    for cols in (16, WIDE):
        program = program_of(attention, (3, 4, 6, cols), (3, 1, 6, cols))
        found = find_match(program, patterns)
        assert found is not None and found.kernel == "masked_softmax_additive"
        texts.add(structure(program).text)
    assert len(texts) == 1


def test_dropout_drops_what_it_dropped_in_the_other_order():
    dims = 2, 3, 4, WIDE // 2
    build = Build(dims, is_reduced=True)
    total = build.add("add", build.load("x"), build.load("mask", (4 * dims[-1], 0, dims[-1], 1)))
    row = build.add("index", dim=2, dtype="int64")
    total = build.add("where", build.add("le", build.add("index", dim=3, dtype="int64"), row), total, build.const(0.0))
    build.store("out", build.add("mul", build.add("sub", total, build.add("reduce_sum", total)), build.dropout(0.5)))
    before = build.program()
    after = share_rows(before)
    assert (before.dims, after.dims) == (dims, (2, 4, 3, dims[-1]))
    inputs = torch.randn(dims).flatten(), torch.randn(2, 4, dims[-1]).flatten(), torch.tensor([5])
    torch.testing.assert_close(evaluate(after, *inputs), evaluate(before, *inputs), rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_lowering_computes_it(name):
    function, *_ = CASES[name]
    check(function, *make_inputs(name, torch.float64))


@needs_compiler
@pytest.mark.parametrize("backend", ["cpp", "cuda"])
def test_kernels_compute_it_on_the_host(tmp_path, backend):
    launches, results = [], {}
    for name in CASES if backend == "cuda" else ("bias and mask", "boolean"):  # g++ takes its time for each
        function, inputs = CASES[name][0], make_inputs(name, BF16)
        lowered = lower_function(function, *inputs)[0]
        rendered = backend_of(backend).render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
        out = torch.zeros(function(*inputs).shape, dtype=BF16)
        results[name] = out, function(*(x.double() if x.is_floating_point() else x for x in inputs))
        given = [inputs[root] for root in lowered.inputs]
        if backend == "cuda":
            launches.append(cuda_on_host.Launch(rendered=rendered, program=lowered.program, inputs=given, outputs=[out]))
        else:
            backend_of(backend).build(rendered, tmp_path / f"{rendered.entry}.cpp").bind(lowered.program)(*given, out)
    cuda_on_host.run_all(launches, tmp_path)
    for name, (out, expected) in results.items():
        torch.testing.assert_close(out.double(), expected, rtol=8e-3, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_triton_computes_it_in_the_interpreter(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    command = [sys.executable, str(HERE / "row_order_cases.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_triton_compiles_it():
    program = program_of(additive, (3, 4, 6, WIDE), (3, 1, 6, WIDE))
    assert compile_for(program, backend_of("triton").render(program, HEADER, tuning=Tuning(), fast_math=False), 90)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("name", CASES)
def test_on_the_device(tmp_path, name, backend):
    function, *_ = CASES[name]
    inputs = [x.cuda() for x in make_inputs(name, BF16)]
    lowered = lower_function(function, *inputs)[0]
    rendered = backend_of(backend).render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
    out = torch.zeros(function(*inputs).shape, dtype=BF16, device="cuda")
    launch = backend_of(backend).build(rendered, tmp_path / f"k{rendered.suffix}").bind(lowered.program)
    launch(*(inputs[root] for root in lowered.inputs), out)
    expected = function(*(x.double() if x.is_floating_point() else x for x in inputs))
    torch.testing.assert_close(out.double(), expected, rtol=8e-3, atol=1e-6)
