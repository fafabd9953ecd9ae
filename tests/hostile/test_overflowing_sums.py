"""Squares that fp32 cannot hold: on the CPU eager's std sums them in fp64."""

from __future__ import annotations

import shutil

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cpp.backend import CppBackend
from tests.kernel_cases.lowered import lower_function

FUNCTIONS = {"std": lambda x: x.std(-1), "norm": lambda x: x.norm(dim=-1)}


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles for the CPU")
@pytest.mark.parametrize("scale", [1.0, 3e19, 1e30, 1e-30])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_of_large_or_small_numbers(name, scale, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * scale
    lowered, _ = lower_function(FUNCTIONS[name], x)
    header = Header(title="case", summary="a test", origin="a test")
    rendered = CppBackend().render(lowered.program, header, tuning=Tuning(), fast_math=False)
    got = torch.empty(4)
    CppBackend().build(rendered, tmp_path / "case.cpp").bind(lowered.program)(x, got)
    torch.testing.assert_close(got.double(), FUNCTIONS[name](x.double()), rtol=1e-6, atol=0.0)
