"""Chains of backward passes on each backend: no further from fp64 than eager allows, and bit-equal from run to run."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cpp.backend import CppBackend, find_compiler
from fusion_advisor.codegen.cuda.backend import CudaBackend
from tests.kernel_cases.lowered import lower_function

_aten = torch.ops.aten
HEADER = Header(title="case", summary="a test", origin="a test")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS, REPEATS, TOKENS, WIDTH = 2, 3, 5, 16


def rotated_heads(gradient, cos, sin):
    """A rotary embedding's gradient, of keys that several heads of queries read."""
    keys = gradient.sum(2)
    turned, half = keys * sin, WIDTH // 2
    shape = list(turned.shape)
    first = _aten.slice_backward(-turned[..., :half], shape, 3, half, 2**63 - 1, 1)
    return keys * cos + (first + _aten.slice_backward(turned[..., half:], shape, 3, 0, half, 1))


def one_token(gradient, other):
    """The gradient of a classifier that reads the first token alone."""
    return _aten.select_backward(gradient * 2, [HEADS, TOKENS, WIDTH], 1, 0) + other


def masked_scores(scores, mask):
    return _aten._safe_softmax((scores * 0.5).masked_fill(mask, -math.inf), -1)


def padded_rows(gradient, result):
    """Scores of the rows that were attended to, among zeros for all others."""
    scores = _aten._softmax_backward_data(gradient, result, -1, result.dtype)
    return _aten.slice_backward(scores * 0.5, [HEADS, TOKENS + 3, WIDTH], 1, 1, TOKENS + 1, 1)


def gate_factors(gradient, gate, up):
    """The gradients of both factors of a gate's product, and the product again."""
    active = torch.nn.functional.silu(gate)
    return active * up, active * gradient, _aten.silu_backward(gradient * up, gate)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _mask():
    mask = drawn(HEADS, TOKENS, WIDTH, seed=3) > 0
    mask[0, 1] = True
    return mask


CASES = {
    rotated_heads: lambda: (drawn(2, HEADS, REPEATS, TOKENS, WIDTH), drawn(TOKENS, WIDTH, seed=1), drawn(TOKENS, WIDTH, seed=2)),
    one_token: lambda: (drawn(HEADS, WIDTH), drawn(HEADS, TOKENS, WIDTH, seed=1)),
    masked_scores: lambda: (drawn(HEADS, TOKENS, WIDTH), _mask()),
    padded_rows: lambda: (drawn(HEADS, TOKENS, WIDTH), drawn(HEADS, TOKENS, WIDTH, seed=1).softmax(-1)),
    gate_factors: lambda: [drawn(HEADS, TOKENS, WIDTH, seed=seed) for seed in range(3)],
}


def judge(backend, folder):
    """Run every case on a backend; the first that is wrong raises."""
    for number, (function, dtype) in enumerate(itertools.product(CASES, DTYPES)):
        inputs = [one.to(dtype) if one.is_floating_point() else one for one in CASES[function]()]
        lowered, ops = lower_function(function, *inputs)
        rendered = backend.render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
        launch = backend.build(rendered, folder / f"case{number}{rendered.suffix}").bind(lowered.program)
        shapes = [ops[index].outputs[0].shape for index in lowered.outputs]
        found = [[torch.full(shape, 7.0, dtype=dtype) for shape in shapes] for _ in range(2)]
        for results in found:
            launch(*(inputs[root] for root in lowered.inputs), *results)
        truths = listed(function(*(one.double() if one.is_floating_point() else one for one in inputs)))
        # The interpreter cuts bfloat16 off where a GPU rounds: twice the error of one rounding.
        slack = 2.2 if backend.name == "triton" and dtype is torch.bfloat16 else 1.5
        case = (function.__name__, dtype)
        for result, again, truth, eager in zip(*found, truths, listed(function(*inputs)), strict=True):
            own = (eager.double() - truth).norm()
            assert torch.equal(result, again), case
            assert (result.double() - truth).norm() <= slack * (own + 0.5 * torch.finfo(dtype).eps * truth.norm()), case


def listed(results):
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_cpp_is_as_near_to_fp64_as_eager_and_bit_equal_from_run_to_run(tmp_path):
    judge(CppBackend(), tmp_path)


@pytest.mark.slow
def test_triton_is_as_near_to_fp64_as_eager_and_bit_equal_from_run_to_run(tmp_path):
    script = (
        "import pathlib, sys\n"
        "from fusion_advisor.codegen.triton.backend import TritonBackend\n"
        "from tests.codegen.test_backward_chains import judge\n"
        "judge(TritonBackend(), pathlib.Path(sys.argv[1]))\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False, env=environment, cwd=root
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("function", CASES)
def test_cuda_prints_each_as_one_kernel(function):
    lowered, _ = lower_function(function, *CASES[function]())
    rendered = CudaBackend().render(lowered.program, HEADER, tuning=Tuning(), fast_math=False)
    assert rendered.source.count("__global__") == 1 and not rendered.parts
