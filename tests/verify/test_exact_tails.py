"""The oracle's GELU keeps its digits where the sum that eager computes cancels."""

from __future__ import annotations

import math

import pytest
import torch

from tests.verify.test_check_chain import chain_of

X = torch.tensor([-8.5, -6.0, -2.0, -0.0, 0.0, 0.3, 5.0, 40.0])
SPELLED = {
    "gelu": torch.nn.functional.gelu,
    "one_plus_erf": lambda x: x * 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5))),
    "erf_plus_one": lambda x: x * 0.5 * (torch.erf(x * math.sqrt(0.5)) + 1.0),
}


@pytest.mark.parametrize("name", SPELLED)
def test_the_tail_of_a_gelu_has_all_its_digits(name):
    (found,) = chain_of(SPELLED[name], X).run([X], as_float64=True)
    exact = [0.5 * x * math.erfc(-x * math.sqrt(0.5)) for x in X.double().tolist()]
    torch.testing.assert_close(found, torch.tensor(exact, dtype=torch.float64), rtol=1e-14, atol=0)
    assert found[0] < 0 and found[3].signbit() and not found[4].signbit()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.nn.functional.gelu(x, approximate="tanh"), lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        (lambda x: torch.erf(x) + 2.0, lambda x: torch.erf(x) + 2.0),
        (lambda x: torch.add(1.0, torch.erf(x), alpha=2), lambda x: 1.0 + 2 * torch.erf(x)),
        (lambda x: torch.exp(x) + 1.0, lambda x: torch.exp(x) + 1.0),
    ],
    ids=["tanh", "another_number", "alpha", "another_function"],
)
def test_other_ops_are_run_as_they_are(function, expected):
    (found,) = chain_of(function, X).run([X], as_float64=True)
    assert torch.equal(found, expected(X.double()))
