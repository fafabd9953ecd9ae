"""Tables of which few rows are read: the oracle is the same, what is drawn is small, and a wrong row is found out."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from fusion_advisor.verify.check_chain import check_chain, random_like
from fusion_advisor.verify.row_tables import look_up, row_tables
from fusion_advisor.verify.special_inputs import overflowing_sums, perturbing, special_inputs
from fusion_advisor.verify.subgraph_oracle import OriginalChain
from tests.verify.test_check_chain import chain_of

IDS = torch.tensor([[3, 0, 3], [90, 7, 0]])
TABLE = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
LOOK_UPS = {
    "embedding": lambda ids, table: functional.embedding(ids, table) * 3.0 + 1.0,
    "index": lambda ids, table: table[ids] * 3.0 + 1.0,
    "index_select": lambda ids, table: table.index_select(0, ids.flatten()) * 3.0 + 1.0,
}
OTHERS = {
    "read whole": lambda ids, table: functional.embedding(ids, table) + table[:2, None].sum(),
    "columns": lambda ids, table: table.index_select(1, ids.flatten() % 8) * 3.0,
    "a view": lambda ids, table: functional.embedding(ids, table[1:]) * 3.0,
}


def tables(chain: OriginalChain) -> set[int]:
    return set(row_tables(chain.nodes, chain.outer, chain.written))


@pytest.mark.parametrize("name", LOOK_UPS)
def test_a_table_is_found_and_its_oracle_is_that_of_the_whole_table(name):
    chain = chain_of(LOOK_UPS[name], IDS, TABLE)
    assert tables(chain) == {1}
    assert chain.rows_read([IDS, TABLE])[1].tolist() == [0, 3, 7, 90]
    (exact,) = chain.run([IDS, TABLE], as_float64=True)
    assert exact.dtype == torch.float64 and torch.equal(exact, LOOK_UPS[name](IDS, TABLE.double()))
    (nearby,) = chain.run([IDS, TABLE], as_float64=True, widen=perturbing(1))
    assert 0 < float((nearby - exact).abs().max()) < 1e-5


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_read_in_another_way_too_is_no_table(name):
    chain = chain_of(OTHERS[name], IDS, TABLE)
    assert not tables(chain) and not chain.rows_read([IDS, TABLE])
    (exact,) = chain.run([IDS, TABLE], as_float64=True)
    torch.testing.assert_close(exact, OTHERS[name](IDS, TABLE.double()))


@pytest.mark.parametrize(
    ("dtype", "is_found"), [(torch.int64, True), (torch.int32, True), (torch.bool, False), (torch.uint8, False)]
)
def test_a_mask_holds_no_row_numbers(dtype, is_found):
    graph = torch.fx.Graph()
    table, ids = graph.placeholder("table"), graph.placeholder("ids")
    ids.meta["val"] = torch.zeros(100, dtype=dtype)
    node = graph.call_function(torch.ops.aten.index.Tensor, (table, [ids]))
    assert look_up(node) == ((table, ids) if is_found else None)


def test_ids_below_zero_count_from_the_end():
    chain = chain_of(LOOK_UPS["index"], IDS - 100, TABLE)
    assert chain.rows_read([IDS - 100, TABLE])[1].tolist() == [0, 3, 7, 90]


def test_a_random_table_has_numbers_where_it_is_read_and_nan_elsewhere():
    chain = chain_of(LOOK_UPS["embedding"], IDS, TABLE)
    ids, table = random_like([IDS, TABLE], 0, 32.0, chain.rows_read([IDS, TABLE]))
    assert ids is IDS and table.shape == TABLE.shape and table.dtype == TABLE.dtype
    assert table[[0, 3, 7, 90]].isfinite().all() and 10 < float(table[[0, 3, 7, 90]].std()) < 60
    assert int(table.isnan().all(dim=1).sum()) == 96


def test_a_table_of_which_most_rows_are_read_is_drawn_whole():
    (_, table) = random_like([IDS, TABLE], 0, 1.0, {1: torch.arange(60)})
    assert table.isfinite().all()


@pytest.mark.parametrize(("shift", "is_right"), [(0, True), (1, False)])
def test_a_kernel_that_reads_the_next_row_is_refused(shift, is_right):
    chain = chain_of(LOOK_UPS["embedding"], IDS, TABLE)
    found = check_chain(chain, lambda ids, table: LOOK_UPS["embedding"](ids + shift, table), [IDS, TABLE], seed=0)
    assert found.is_passed is is_right


def test_special_rows_are_the_rows_that_are_read():
    """A table of 100 rows of which 4 are read: filled as a whole, most classes would lie where nobody looks."""
    chain = chain_of(LOOK_UPS["embedding"], IDS, TABLE)
    read = chain.rows_read([IDS, TABLE])
    sets = dict(special_inputs([IDS, TABLE], 0, is_in_place=False, read=read))
    runs = [tensors[1] for title, tensors in sets.items() if title.startswith("special rows")]
    assert len(runs) == 4, "sixteen classes in four rows each"
    others = [row for row in range(100) if row not in read[1].tolist()]
    assert all(torch.equal(run[others], TABLE[others]) for run in runs)
    seen = torch.cat([run[read[1]] for run in runs])
    assert seen.isnan().all(1).sum() == 1 and seen.isinf().all(1).sum() == 2 and (seen == 0).all(1).sum() == 2
    assert torch.isnan(sets["NaN at the end of each operand"][1]).nonzero().tolist() == [[90, 7]]
    ((_, (_, overflowing)),) = overflowing_sums([IDS, TABLE], 0, read=read)
    assert torch.equal(overflowing[others], TABLE[others]) and (overflowing[read[1]].abs() > 1e38).any(1).all()


@pytest.mark.parametrize("wrong", [{"nan": 0.0}, {"posinf": 1e30}])
def test_a_kernel_that_is_wrong_on_special_rows_of_a_table_alone_is_found_out(wrong):
    chain = chain_of(LOOK_UPS["embedding"], IDS, TABLE)

    def fused(ids, table):
        as_it_is = {"nan": math.nan, "posinf": math.inf, "neginf": -math.inf}
        return functional.embedding(ids, table.nan_to_num(**{**as_it_is, **wrong})) * 3.0 + 1.0

    assert not check_chain(chain, fused, [IDS, TABLE], seed=0).is_passed
    assert check_chain(chain, LOOK_UPS["embedding"], [IDS, TABLE], seed=0).is_passed


BOXES = torch.tensor([[3, 3], [0, 8], [7, 8], [1, 8], [5, 8]])
SMALL = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "looks_up",
    [
        lambda boxes, table: functional.embedding(boxes[:, 1] - boxes[:, 0], table) * 2.0,
        lambda boxes, table: functional.embedding(boxes[:, 0], table[:8]) + functional.embedding(boxes[:, 1], table),
        lambda boxes, table: functional.embedding((boxes > 3).long().cumsum(0), table[:6]) * 2.0,
    ],
    ids=["widths of boxes", "a table for each column", "counts"],
)
def test_places_that_belong_together_are_not_exchanged(looks_up):
    """A box of another one's end is none: on a GPU a place outside of the table ends the process."""
    chain = chain_of(looks_up, BOXES, SMALL)
    assert chain.keeps_indices and not chain_of(LOOK_UPS["embedding"], IDS, TABLE).keeps_indices
    assert check_chain(chain, looks_up, [BOXES, SMALL], seed=0).is_passed
