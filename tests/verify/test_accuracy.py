"""Errors and their limits: which error is beyond, by how much, and what is never within."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fusion_advisor.verify.accuracy import Error, limit_for, unit_of
from fusion_advisor.verify.check_chain import check_calls, why_wrong
from tests.verify.test_check_chain import chain_of

LIMIT, UNIT = limit_for(torch.float32), unit_of(torch.float32)
THEIRS = Error(max_abs=1e-5, rel_l2=1e-5, oracle_max=1.0, nonfinite=0, elements=100)


@pytest.mark.parametrize(
    ("changed", "excess"),
    [
        ({}, 1 / 1.5),
        ({"rel_l2": 3e-5}, 2.0),
        ({"max_abs": 6e-5}, 3.0),
        ({"rel_l2": 3e-5, "max_abs": 6e-5}, 3.0),
        ({"rel_l2": math.nan}, math.inf),
        ({"max_abs": math.inf}, math.inf),
    ],
)
def test_the_error_that_is_farther_beyond_its_limit_counts(changed, excess):
    ours = replace(THEIRS, **changed)
    assert LIMIT.excess(ours, THEIRS, UNIT) == pytest.approx(excess)
    assert LIMIT.allows(ours, THEIRS, UNIT) == (excess <= 1)


def test_an_error_just_beyond_its_limit_is_not_allowed():
    edge = 1.5 * THEIRS.rel_l2
    assert LIMIT.allows(replace(THEIRS, rel_l2=edge), THEIRS, UNIT)
    assert not LIMIT.allows(replace(THEIRS, rel_l2=math.nextafter(edge, 1)), THEIRS, UNIT)


def test_without_any_limit_only_no_error_is_allowed():
    exact = Error(max_abs=0.0, rel_l2=0.0, oracle_max=3.0, nonfinite=0, elements=4)
    assert LIMIT.allows(exact, exact, 0.0)
    assert not LIMIT.allows(replace(exact, max_abs=1.0), exact, 0.0)
    assert not LIMIT.allows(replace(exact, nonfinite=1), exact, 0.0)


def test_the_result_that_is_shown_is_the_one_that_was_refused():
    """The first call has the larger relative error and is within its limit; one element of the second is far off."""
    x = torch.rand(400, 500, generator=torch.Generator().manual_seed(0))
    chain = chain_of(lambda x: x / 3, x)

    def one_off(x):
        result = x / 3
        result[7, 7] += 10 * UNIT * float(result.max())
        return result

    found = check_calls([(chain, lambda x: x * torch.tensor(1 / 3), [x]), (chain, one_off, [x])], inputs="both")
    assert not found.is_passed
    assert found.fused_max_abs > 4 * UNIT * float(x.max()) / 3
    assert f"largest error {found.fused_max_abs:.2e}, the original ops have {found.eager_max_abs:.2e}" in why_wrong(found)
