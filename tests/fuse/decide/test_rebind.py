"""Fusions on a changed graph keep the names that the library's kernel gave to their operands."""

from __future__ import annotations

import pytest

from fusion_advisor.codegen.common.interface import Tuning
from fusion_advisor.codegen.registry import backend
from fusion_advisor.fuse.decide.rebind import changed_bench, relocate
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.passes.merge_gemms import merge_linears
from tests.tiny import planned, profiled


@pytest.fixture(scope="module")
def merged():
    """The fusions of a Qwen2 whose projections run as one GEMM, by kernel."""
    bench = Bench(profiled("qwen2")[2], on_cuda=False)
    new, moved = changed_bench(bench, [merge_linears(region, may_copy=True) for region in bench.live.regions])
    return {fusion.match.kernel: relocate(fusion, new, moved) for fusion in planned("qwen2").fusions}


@pytest.mark.parametrize(
    ("kernel", "names"),
    [("rope_qk", {"q_k", "cos", "sin", "q_out", "k_out"}), ("swiglu", {"gate_up", "out"})],
)
def test_a_merged_projection_has_the_names_of_what_it_holds(merged, kernel, names):
    assert merged[kernel]
    for fusion in merged[kernel]:
        assert {operand.name for operand in fusion.program.operands} == names
        for name in ("triton", "cuda", "cpp"):
            source = backend(name).render(fusion.program, fusion.header, tuning=Tuning(), fast_math=False).source
            assert all(name in source for name in names) and "x2" not in source


def test_a_chain_that_did_not_move_keeps_its_program(merged):
    before = {fusion.match.kernel: fusion for fusion in planned("qwen2").fusions}
    assert [fusion.program for fusion in merged["add_rmsnorm"]] == [before["add_rmsnorm"].program]
