"""A gradient's formula is tried on what the forward pass can have given it."""

from __future__ import annotations

import torch

from fusion_advisor.verify.check_chain import check_chain
from fusion_advisor.verify.domains import has_moments, log_probabilities, within_domain
from fusion_advisor.verify.special_values import NO_NUMBER, Findings, Results, compare
from tests.verify.test_check_chain import chain_of

_BACKWARD = torch.ops.aten._log_softmax_backward_data


def gradient(grad, output):
    return _BACKWARD(grad * 0.5, output, -1, torch.float32) * 2.0


GRAD, OUTPUT = torch.randn(6, 40), torch.log_softmax(torch.randn(6, 40), -1)


def test_logarithms_of_probabilities_are_made_negative_and_nothing_else_is_changed():
    chain = chain_of(gradient, GRAD, OUTPUT)
    (number,) = log_probabilities(chain)
    inputs = [torch.randn(40, 6).t(), torch.randn(40, 6).t()]
    before = [one.clone() for one in inputs]
    found = within_domain(chain, inputs)
    assert torch.equal(found[number], -inputs[number].abs()) and found[number].stride() == inputs[number].stride()
    assert found[1 - number] is inputs[1 - number]
    assert all(torch.equal(one, other) for one, other in zip(inputs, before, strict=True))
    assert within_domain(chain, found)[number] is found[number]


def test_a_chain_without_such_an_op_takes_any_number():
    chain = chain_of(lambda x, y: torch.exp(x) * y, GRAD, OUTPUT)
    assert log_probabilities(chain) == frozenset()


def test_a_kernel_is_not_refused_for_exponentials_that_no_model_asks_for():
    """``exp2`` of a multiple is off by the rounding of its argument: little for -10, much for 80."""

    def fused(grad, output):
        exponential = torch.exp2(output * 1.4426950408889634)
        return grad - exponential * grad.sum(-1, keepdim=True)

    def wrong(grad, output):
        return fused(grad, output) * (1 + 1e-4)

    chain = chain_of(gradient, GRAD, OUTPUT)
    order = [GRAD, OUTPUT] if log_probabilities(chain) == {1} else [OUTPUT, GRAD]
    assert order[1] is OUTPUT
    assert check_chain(chain, fused, order, seed=0).is_passed
    assert not check_chain(chain, wrong, order, seed=0).is_passed


def test_which_chains_read_or_write_a_rows_mean():
    norm = torch.ops.aten.native_layer_norm.default
    x, weight = torch.randn(6, 40), torch.randn(40)
    assert has_moments(chain_of(lambda x, w: norm(x, [40], w, None, 1e-5), x, weight))
    assert not has_moments(chain_of(lambda x, y: torch.exp(x) * y, GRAD, OUTPUT))


def test_nan_for_an_infinity_is_an_exception_where_a_mean_is_no_number_and_a_fault_elsewhere():
    """Eager's running mean of a row that holds an infinity is NaN or infinite, by where the infinity stands."""
    ours = torch.tensor([float("inf"), float("nan"), 1.0])
    theirs = torch.tensor([float("nan"), float("-inf"), 1.0])
    results = Results(fused=ours, eager=theirs, oracle=theirs.double())
    with_mean, without, finite = Findings(), Findings(), Findings()
    compare("rows", results, with_mean, has_moments=True)
    compare("rows", results, without)
    compare("rows", Results(fused=torch.ones(3), eager=theirs, oracle=theirs.double()), finite, has_moments=True)
    assert not with_mean.faults and with_mean.declared == {NO_NUMBER: 2}
    assert "2 of 3 elements are wrong" in without.faults[0]
    assert "2 of 3 elements are wrong" in finite.faults[0]
