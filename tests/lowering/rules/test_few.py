"""Reductions of a few elements in the midst, as the gradient of repeated heads is: written out, against torch in fp64."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.chains.op_inputs import reduces_few
from fusion_advisor.ir.dtypes import CannotLower
from fusion_advisor.ir.program import REDUCTIONS
from fusion_advisor.records import OpClass
from tests.chains.test_columns import chains
from tests.kernel_cases.lowered import check, lower_function, records
from tests.lowering.rules.test_tables import rand

REDUCED = {
    "sum": lambda x, dims: x.sum(dims),
    "keepdim": lambda x, dims: x.sum(dims, keepdim=True),
    "mean": lambda x, dims: x.mean(dims),
    "amax": lambda x, dims: x.amax(dims),
    "amin": lambda x, dims: x.amin(dims, keepdim=True),
    "between": lambda x, dims: torch.exp((x * 2 + 1).sum(dims)) * 0.5,
}


FEW = [
    ((2, 3, 4), (1,)), ((2, 2, 3, 5, 8), (2,)), ((3, 1, 4), (1,)), ((2, 3, 2, 5), (1, 2)), ((2, 4, 3, 5), (0, 2)),
    ((2, 16, 3), (-2,)),
]  # fmt: skip


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize(("shape", "dims"), FEW, ids=str)
def test_few_elements_in_the_midst(name, shape, dims):
    program = check(lambda x: REDUCED[name](x, dims), rand(*shape))
    assert not program.is_reduced and not any(value.op in REDUCTIONS for value in program.values)


def test_nans_come_through():
    x = rand(2, 3, 4)
    x[0, 1, 2] = float("nan")
    check(lambda x: (x.amax(1), x.amin(1), x.sum(1)), x)


def test_the_gradient_of_repeated_heads_goes_on_to_the_rotation():
    """Each of two heads of keys was read by three of queries; what follows is a rotary embedding's backward pass."""

    def step(g, cos, sin):
        keys = g.reshape(2, 2, 3, 5, 32).sum(2, keepdim=True).squeeze(2)
        turned = keys * sin
        aten = torch.ops.aten
        first = aten.slice_backward(-turned[..., :16], [2, 2, 5, 32], 3, 16, 32, 1)
        return first + aten.slice_backward(turned[..., 16:], [2, 2, 5, 32], 3, 0, 16, 1) + keys * cos

    given = (rand(2, 6, 5, 32), rand(5, 32, seed=1), rand(5, 32, seed=2))
    program = check(step, *given)
    assert not program.is_reduced
    assert chains(records(step, *given)) == [["sum", "mul", "neg", "slice_backward", "slice_backward", "add", "mul", "add"]]


def test_a_norm_reads_what_was_summed():
    check(lambda x: torch.nn.functional.layer_norm(x.sum(1), (8,)), rand(3, 2, 8), rtol=1e-10)


def test_a_sum_of_what_a_norm_computes_is_a_kernel_of_its_own():
    with pytest.raises(CannotLower, match="does not lie in the loop nest"):
        lower_function(lambda x: torch.softmax(x, -1).sum(1), rand(3, 2, 8))


def test_which_reductions_are_of_few():
    def step(x):
        return x.sum(1), x.sum(0), x.sum(-1), x.sum((0, 2)), x.sum((1, 2)), x.mean(2), x.sum((1, 3)), x.std(1)

    ops = records(step, rand(2, 3, 16, 5))
    found = [reduces_few(op, ops) for op in ops if op.op_class is OpClass.REDUCTION]
    assert found == [True, False, False, False, False, True, False, False]


def test_many_elements_in_the_midst_are_left_to_torch():
    with pytest.raises(CannotLower, match="does not lie in the loop nest"):
        lower_function(lambda x: x.sum(1) * 2, rand(2, 17, 4))


def test_integers_and_narrow_results():
    check(lambda x: x.sum(1) + 1, torch.arange(24).reshape(2, 3, 4))
    half = rand(2, 3, 4).to(torch.float32)
    check(lambda x: x.sum(1, dtype=torch.float64) * 2, half, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dim", [1, -1])
def test_a_sum_of_floats_as_integers_is_refused(dim):
    """Each element is cast by itself: of 1e10 torch makes the lowest int32, and a kernel's cast through int64 another number."""
    with pytest.raises(CannotLower, match="of floats as int32"):
        lower_function(lambda x: x.sum(dim, dtype=torch.int32) * 2, torch.full((2, 3, 4), 1e10))
