"""Positions that a chain would never read are left to eager, empty ones are served, and a model works on after an error."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.nn import functional as f

import fusion_advisor as fa
from fusion_advisor.lowering.rules.tables import CannotLower
from tests.kernel_cases.lowered import lower_function

TABLE = torch.randn(19, 8, generator=torch.Generator().manual_seed(0))


def _by_first(rows):
    return rows[0] * rows


CUT = {
    "slice": lambda w, i: f.embedding(i, w)[:3] * 2,
    "step": lambda w, i: f.embedding(i, w)[::2] * 2,
    "select": lambda w, i: f.embedding(i, w)[1] * 2,
    "narrow": lambda w, i: w.index_select(0, i).narrow(0, 1, 2) * 2,
    "tail": lambda w, i: f.embedding(i, w)[1:] * 2,
    "nll": lambda w, i: f.nll_loss(w[:6], i, reduction="none")[:4] * 2,
    "gather": lambda w, i: w.gather(0, i[:, None].expand(-1, 8))[:3] * 2,
}
WHOLE = {
    "all": lambda w, i: f.embedding(i, w) * 2,
    "transposed": lambda w, i: f.embedding(i, w).t() * 2,
    "columns": lambda w, i: f.embedding(i, w)[:, :4] * 2,
    "reshaped": lambda w, i: f.embedding(i.view(2, 3), w).reshape(6, 8) * 2,
    "beside_others": lambda w, i: torch.cat((f.embedding(i, w), w[:5]), 0) * 2,
    "cut_and_whole": lambda w, i: _by_first(f.embedding(i, w)),
    "ids_cut_before": lambda w, i: f.embedding(i[:3], w) * 2,
    "norm": lambda w, i: f.rms_norm(f.embedding(i, w), (8,)),
}


@pytest.mark.parametrize("name", CUT)
def test_a_chain_that_cuts_away_positions_is_refused(name):
    with pytest.raises(CannotLower, match="would not be checked"):
        lower_function(CUT[name], TABLE, torch.tensor([3, 0, 18, 7, 5, 6]))


@pytest.mark.parametrize("name", WHOLE)
def test_a_chain_that_reads_all_positions_is_lowered(name):
    lowered, _ = lower_function(WHOLE[name], TABLE, torch.tensor([3, 0, 18, 7, 5, 6]))
    assert any(value.op == "inside" for value in lowered.program.values)


class Embedded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(TABLE.clone(), requires_grad=False)

    def forward(self, ids, x):
        y = torch.sigmoid(f.embedding(ids, self.table) * x + 1.0)
        return y, f.embedding(ids, self.table)[:2].exp()


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles for the CPU")


@needs_compiler
@torch.no_grad()
def test_the_error_comes_out_of_the_model_which_still_works():
    model, ids, x = Embedded().eval(), torch.tensor([3, 0, 18, 7, 5]), torch.randn(5, 8)
    want = model(ids, x)
    fused = fa.apply(model, (ids, x), keep="verified", min_share=0.0)
    for wrong in (19, -1, 2**40):
        for place in (1, 4):
            spoilt = ids.clone()
            spoilt[place] = wrong
            with pytest.raises(IndexError, match="index out of range in self"):
                fused(spoilt, x)
    for got, right in zip(fused(ids, x), want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-6)
    assert fused.launches > 0


@needs_compiler
@torch.no_grad()
def test_no_ids_give_no_rows():
    model, ids, x = Embedded().eval(), torch.zeros(0, dtype=torch.int64), torch.randn(0, 8)
    fused = fa.apply(model, (ids, x), keep="verified", min_share=0.0)
    assert [one.shape for one in fused(ids, x)] == [(0, 8), (0, 8)]
