"""CUDA kernels for many sizes: what varies is a constant of none."""

from __future__ import annotations

import pytest

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cuda.backend import CudaBackend, compile_for
from fusion_advisor.codegen.cuda.nvrtc import find_nvcc
from tests.kernel_cases import programs as p

HEADER = Header(title="case", summary="a test", origin="generated from the chain")


def heads(count):
    return p.rope(2, count, 5, 64)


def render(program, *elsewhere):
    return CudaBackend().render(program, HEADER, tuning=Tuning(), fast_math=False, elsewhere=elsewhere)


def test_open_sizes_are_divided_by_without_constants():
    one, many = render(heads(3)), render(heads(3), heads(5))
    assert "#ifdef SIZE1" in one.source
    assert "#ifdef SIZE1" not in many.source
    assert "#ifdef SIZE2" in many.source
    assert "Serves any sizes: rows, size1, " in many.source
    assert one.entry != many.entry


def test_a_kernel_without_such_constants_is_what_it_was():
    assert render(p.softmax(5, 24), p.softmax(7, 40)) == render(p.softmax(5, 24))
    assert render(p.rope(2, 3, 5, 64), p.rope(7, 3, 5, 64)) == render(p.rope(2, 3, 5, 64))


def test_programs_of_other_layouts_are_no_other_sizes():
    with pytest.raises(ValueError, match="several layouts"):
        render(p.softmax(5, 24), p.softmax(5, 24, is_causal=True))


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_a_launch_gets_no_constant_of_an_open_size():
    assert compile_for(render(heads(3), heads(5)), 90, program=heads(7))[:4] == b"\x7fELF"
