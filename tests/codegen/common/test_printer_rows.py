"""Approximations of 16-bit kernels end before a step would show them; a choice between numbers has its own dtype."""

from __future__ import annotations

import shutil

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.registry import backend as backend_of
from tests.kernel_cases import cuda_on_host
from tests.kernel_cases.lowered import lower_function

HEADER = Header(title="case", summary="a test", origin="a test")
SHORT = ("_16bit(", "* (1.0 / 41.0)", "* (1.0f / 41.0f)")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++, and there is no g++")


def whole_quotients(x):
    return torch.floor(x / 41.0).to(torch.bfloat16)


def likely(x):
    return torch.where(torch.sigmoid(x) >= 0.5, x, x - 1.0).to(torch.bfloat16)


def whole_tanh(x):
    return torch.round(torch.tanh(x) * 100.0).to(torch.float16)


def likely_gelu(x):
    return torch.where(torch.nn.functional.gelu(x) > 0.5, x, -x).to(torch.bfloat16)


JUMPS = (whole_quotients, likely, whole_tanh, likely_gelu)


def source_of(backend, function, x):
    lowered = lower_function(function, x)[0]
    return backend_of(backend).render(lowered.program, HEADER, tuning=Tuning(), fast_math=False).source


@pytest.mark.parametrize("function", JUMPS)
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_what_a_jump_is_made_of_is_not_approximated(backend, function):
    source = source_of(backend, function, torch.randn(64))
    assert not [one for one in SHORT if one in source]


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_where_nothing_jumps_functions_are_short(backend):
    assert "sigmoid_16bit(" in source_of(backend, lambda x: (torch.sigmoid(x) * x).to(torch.bfloat16), torch.randn(64))
    assert "1.0" in source_of(backend, lambda x: (x / 41.0).to(torch.bfloat16), torch.randn(64)).split("/ 41.0")[0][-6:]


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_function_that_is_rounded_before_the_jump_is_short(backend):
    x = torch.randn(64, dtype=torch.bfloat16)
    source = source_of(backend, lambda x: torch.where(torch.sigmoid(x) >= 0.5, x, x - 1.0), x)
    assert "sigmoid_16bit(" in source and "round_bf16(" in source


@needs_compiler
@pytest.mark.parametrize("function", [whole_quotients, likely])
def test_jumps_are_where_eager_has_them(function, tmp_path):
    x = torch.arange(-500.0, 500.0)
    program = lower_function(function, x)[0].program
    rendered = backend_of("cuda").render(program, HEADER, tuning=Tuning(), fast_math=False)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    cuda_on_host.run(rendered, program, [x], [out], tmp_path)
    assert torch.equal(out, function(x))


def chosen_products(x):
    return torch.where(x > 0, 65536, 0) * torch.where(x > 0.5, 65536, 1)


@needs_compiler
def test_choices_between_whole_numbers_are_64_bits_wide_in_cuda(tmp_path):
    x = torch.tensor([1.0, -1.0, 0.3])
    program = lower_function(chosen_products, x)[0].program
    rendered = backend_of("cuda").render(program, HEADER, tuning=Tuning(), fast_math=False)
    out = torch.empty(3, dtype=torch.int64)
    cuda_on_host.run(rendered, program, [x], [out], tmp_path)
    assert out.tolist() == [2**32, 0, 65536]


@pytest.mark.parametrize(
    ("function", "dtype", "written"),
    [
        (chosen_products, "float32", ("tl.full([], 65536, tl.int64), 0)", "tl.full([], 65536, tl.int64), 1)")),
        (lambda x: torch.where(x > 0, 200000, 0).sum(-1), "float32", ("tl.full([], 200000, tl.int64), 0)",)),
        (
            lambda x: torch.where(x > 0, torch.full_like(x, 0.1), torch.zeros_like(x)),
            "float64",
            ("tl.full([], 0.1, tl.float64)",),
        ),
    ],
    ids=["product", "sum", "float64"],
)
def test_choices_between_numbers_have_their_dtype_in_triton(function, dtype, written):
    source = source_of("triton", function, torch.randn(4, 64, dtype=getattr(torch, dtype)))
    assert all(part in source for part in written)
