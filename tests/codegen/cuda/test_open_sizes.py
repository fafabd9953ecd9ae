"""CUDA kernels for many sizes: what varies is a constant of none."""

from __future__ import annotations

import pytest

from fusion_advisor.codegen.common.horizontal_fusion import calls_of
from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cuda.backend import CudaBackend
from fusion_advisor.codegen.cuda.tiling import launch_shapes
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


def test_launches_of_open_sizes_share_their_macros():
    """Each set of macros is compiled once."""
    plans = [[call.plan for call in calls_of(heads(count), flatten_rows=True)] for count in (32, 64)]
    one, many = render(heads(32)), render(heads(32), heads(64))

    def macros(rendered):
        opened = rendered.open_arguments.names
        return [launch_shapes(plan, Tuning(), form=rendered.form, width=8, opened=opened)[0] for plan in plans]

    assert [found["SIZE1"] for found in macros(one)] == [32, 64]
    assert macros(many)[0] == macros(many)[1]
