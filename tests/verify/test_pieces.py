"""Large results are compared in pieces, and nothing of what they show is lost."""

from __future__ import annotations

import math

import pytest
import torch

from fusion_advisor.records import Tolerance
from fusion_advisor.verify.accuracy import error_of, is_inside
from fusion_advisor.verify.comparison import count_ulps
from fusion_advisor.verify.pieces import MOST, pieces
from fusion_advisor.verify.special_values import Findings, Results, bias_of, compare

COLUMNS = 4096
ROWS = MOST // COLUMNS + 2


@pytest.fixture(scope="module")
def truth() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).add_(2).double()


@pytest.mark.parametrize("keeps_rows", [False, True])
def test_all_elements_are_in_one_piece_each_and_no_row_is_cut(keeps_rows: bool) -> None:
    one, other = torch.arange(35).reshape(7, 5), torch.arange(35).reshape(5, 7).t()
    found = list(pieces((one, other), keeps_rows=keeps_rows, most=11))
    assert torch.cat([left.flatten() for left, _ in found]).tolist() == one.flatten().tolist()
    assert torch.cat([right.flatten() for _, right in found]).tolist() == other.flatten().tolist()
    assert [left.numel() for left, _ in found] == ([10, 10, 10, 5] if keeps_rows else [11, 11, 11, 2])


def test_a_small_result_is_one_piece_as_it_is() -> None:
    one = torch.zeros(3, 4).t()
    ((same,),) = pieces((one,), most=12)
    assert same is one


@pytest.mark.parametrize("place", [(0, 0), (ROWS - 1, COLUMNS - 1)])
def test_an_error_in_any_piece_is_found(truth: torch.Tensor, place: tuple[int, int]) -> None:
    result = truth.float()
    result[place] += 64.0
    found = error_of(result, truth)
    assert found.max_abs == pytest.approx(64.0, rel=1e-6)
    assert found.rel_l2 == pytest.approx(64.0 / float(torch.linalg.vector_norm(truth)), rel=1e-6)
    assert found.oracle_max == float(truth.abs().max())
    assert (found.elements, found.nonfinite) == (truth.numel(), 0)
    assert not is_inside(result, truth, Tolerance(rtol=0.0, atol=1.0))
    assert count_ulps(result, truth)[-1] == 1
    result[place] = math.nan
    assert error_of(result, truth).nonfinite == 1


def test_a_result_that_is_cut_off_leans_in_pieces_too(truth: torch.Tensor) -> None:
    cut_off = truth.float().view(torch.int32).bitwise_and(-65536).view(torch.float32).bfloat16()
    lean, count = bias_of(cut_off, truth)
    assert lean == pytest.approx(-0.5, abs=0.01)
    assert count > 0.99 * truth.numel()


@pytest.mark.parametrize("row", [0, ROWS - 1])
def test_special_values_are_compared_in_every_piece(truth: torch.Tensor, row: int) -> None:
    eager = truth.bfloat16()
    fused = eager.clone()
    fused[row, 7] = math.inf
    findings = Findings()
    compare("rows", Results(fused=fused, eager=eager, oracle=truth), findings)
    (fault,) = findings.faults
    assert "are wrong, the first is inf" in fault
