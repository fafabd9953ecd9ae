"""The softmax of attention in plain ops: rows that a mask leaves nothing of are 0, and all else is softmax's."""

from __future__ import annotations

import math

import pytest
import torch

from fusion_advisor.ir.program import REDUCTIONS
from tests.kernel_cases.lowered import check
from tests.lowering.rules.test_tables import rand

_safe_softmax = torch.ops.aten._safe_softmax


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 8), (4, 1), (1, 7)], ids=str)
def test_is_softmax_where_something_is_left(shape):
    program = check(lambda x: _safe_softmax(x * 3, -1), rand(*shape))
    assert sum(value.op in REDUCTIONS for value in program.values) <= 2  # one maximum and one sum


def test_masked_rows_are_zero_and_rows_with_nan_are_nan():
    x = rand(6, 4)
    x[1] = -math.inf
    x[2, 1:] = -math.inf
    x[3] = torch.tensor([math.nan, -math.inf, -math.inf, -math.inf])
    x[4, 0] = math.inf
    check(lambda x: _safe_softmax(x, -1) * 2, x)
    assert torch.equal(_safe_softmax(x, -1)[1], torch.zeros(4, dtype=torch.float64))


def test_scores_that_were_scaled_and_masked():
    def attended(x, mask):
        return _safe_softmax((x * 0.25).masked_fill(mask, -math.inf), -1)

    mask = rand(2, 4, 8, seed=1) > 0
    mask[0, 1] = True
    check(attended, rand(2, 4, 8), mask)
