"""Kernels that write rows where a tensor says: what they are made of, and that they write nowhere else."""

from __future__ import annotations

import shutil

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cpp.backend import CppBackend
from fusion_advisor.codegen.cuda.backend import CudaBackend
from fusion_advisor.ir.program import layout_key, nests
from fusion_advisor.library.discover import load_kernel
from fusion_advisor.library.match import find_match
from fusion_advisor.library.patterns import kernel_patterns
from fusion_advisor.lowering.rules.tables import CannotLower
from tests.kernel_cases import cuda_on_host
from tests.kernel_cases.gathered import gathered
from tests.kernel_cases.lowered import lower_function

HEADER = Header(title="case", summary="a test", origin="a test")
CACHE, AT, ROWS = torch.zeros(3, 9, 16), torch.tensor([4, 0]), torch.randn(3, 2, 16)


def test_the_row_s_number_moves_the_store_and_guards_it():
    lowered, ops = lower_function(lambda c, i, x: c.index_copy_(1, i, x * 2), CACHE, AT, ROWS)
    (store,) = lowered.program.stores
    values = lowered.program.values
    assert [values[arg].op for arg in store.args] == ["load"] and store.steps == (16,)
    assert values[store.guard].op == "inside" and [v.constant for v in values if v.op == "extent"] == [9]
    assert lowered.program.operands[-1].element_count == ROWS.numel()  # what is written, not what is there
    assert [ops[index].target for index in lowered.written] == ["x0"]
    assert lowered.given == (*lowered.inputs, *lowered.written)


def test_queries_have_a_loop_nest_and_what_goes_into_the_cache_another():
    program, _ = gathered("gathered_rope_cache")
    assert [len(part.program.stores) for part in nests(program)] == [2, 4]  # halves of q; of k and of v
    assert [all(s.guard is not None for s in part.program.stores) for part in nests(program)] == [False, True]
    alike, _ = gathered("gathered_rope_cache_alike")
    assert len(nests(alike)) == 1 and layout_key(alike) != layout_key(program)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda c, i, x: c.index_copy_(1, i, x).relu(), "no lowering"),  # reads what it wrote
        (lambda c, i, x: c.index_add_(1, i, x), "in place"),
        (lambda c, i, x: c.add_(x.sum()), "in place"),
    ],
    ids=["read after", "index_add_", "add_"],
)
def test_other_writes_are_refused(function, words):
    with pytest.raises(CannotLower, match=words):
        lower_function(function, CACHE, AT, ROWS)


def test_a_part_of_a_tensor_is_refused():
    with pytest.raises(CannotLower, match="part of a tensor"):
        lower_function(lambda c, i, x: c[1].index_copy_(1, i, x), torch.zeros(2, 3, 9, 16), AT, ROWS)


def test_a_cache_whose_rows_share_memory_is_refused():
    with pytest.raises(CannotLower, match="share memory"):
        lower_function(lambda c, i, x: c.index_copy_(1, i, x), torch.zeros(1, 9, 16).expand(3, 9, 16), AT, ROWS)


@pytest.mark.parametrize("sizes", [(1, 4, 2, 1, 16, 9), (3, 4, 1, 1, 8, 5), (2, 3, 3, 1, 6, 7), (2, 6, 2, 4, 16, 9)])
def test_the_library_finds_its_kernel_and_no_other_does(sizes):
    from tests.kernel_cases.gathered import _rope_cache, _rope_inputs

    with_cache, without = (tuple(kernel_patterns(load_kernel(name).spec)) for name in ("rope_qk_cache", "rope_qk"))
    q, k, v, cos, sin, *rest = _rope_inputs(*sizes)
    tables = [t.expand(q.shape[0], *t.shape[1:]).clone() for t in (cos, sin)]  # a row of each batch, or one for all
    for given in ((cos, sin), tables):
        program = lower_function(_rope_cache, q, k, v, *given, *rest)[0].program
        found = find_match(program, with_cache)
        assert find_match(program, without) is None
        if given is tables or sizes[0] == 1 or sizes[3] == 1:
            assert found is not None and found.kernel == "rope_qk_cache"


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles for the CPU")
@pytest.mark.parametrize("backend", ["cpp", "cuda"])
def test_positions_out_of_range_write_nothing_into_the_memory_around(tmp_path, backend):
    """The cache lies in the middle of a larger buffer; the kernel stops, as eager does."""
    lowered, ops = lower_function(
        lambda c, i, x: c.index_copy_(0, i, x), CACHE[0], torch.zeros(6, dtype=torch.int64), ROWS[0, :1].expand(6, 16).clone()
    )
    program = lowered.program
    memory = torch.zeros(5 * 9 * 16)
    cache, rows = memory[2 * 9 * 16 : 3 * 9 * 16], torch.randn(6, 16)
    at = torch.tensor([-1, 9, 8, 10, -9, 2**61])
    by_name = {"x1": at, "x2": rows.flatten()}
    given = [by_name[ops[index].target] for index in lowered.inputs]
    maker = CppBackend() if backend == "cpp" else CudaBackend()
    rendered = maker.render(program, HEADER, tuning=Tuning(), fast_math=False)
    if backend == "cpp":
        with pytest.raises(IndexError, match="out of bounds for dimension 0 with size 9"):
            maker.build(rendered, tmp_path / "case.cpp").bind(program)(*given, cache)
    else:
        with pytest.raises(cuda_on_host.DeviceAssertion):
            cuda_on_host.run(rendered, program, given, [cache], tmp_path)
    expected = torch.zeros(5 * 9, 16)
    expected[2 * 9 + 8] = rows[2]
    assert torch.equal(memory.view(-1, 16), expected)
