"""An error over the limit is looked at again where luck may have decided it; nothing that is wrong gets through by that."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from fusion_advisor.capture.graph.op_classes import is_collective
from fusion_advisor.verify.check_chain import check_calls
from fusion_advisor.verify.comparison import Comparison
from fusion_advisor.verify.special_values import Results
from fusion_advisor.verify.subgraph_oracle import OriginalChain
from tests.verify.test_check_chain import chain_of

UNIT = torch.finfo(torch.float32).eps
USUAL = [10.0, 11.0, 9.0, 10.0, 12.0, 8.0, 10.0, 10.0]
"""Errors of the original on eight inputs that differ by roundings, in units; three on those of the call."""


def compared(ours, theirs, *, elsewhere=(USUAL, USUAL)):
    """Compare results of which one element has an error of so many units."""

    def results(mine, other, moved=None):
        oracle = torch.ones(4, dtype=torch.float64)
        fused, eager = (torch.tensor([1.0 + units * UNIT, 1.0, 1.0, 1.0]) for units in (mine, other))
        return Results(fused=fused, eager=eager, oracle=oracle, elsewhere=moved)

    found = Comparison(fast_math=False, tolerance=None)
    moved = None if elsewhere is None else lambda seed: results(elsewhere[0][seed], elsewhere[1][seed])
    found.add(results(ours, theirs, moved))
    return found


def test_an_error_within_its_limit_is_not_looked_at_again():
    found = compared(14.0, 10.0, elsewhere=([float("nan")] * 8, USUAL))
    assert found.is_passed and not found.has_moved


def test_an_original_that_is_near_the_truth_by_luck_sets_no_limit():
    found = compared(12.0, 3.0)
    assert found.is_passed and found.has_moved
    numerics = found.numerics(inputs="some", limit="a limit")
    assert numerics.inputs == "some; errors are medians over 9 inputs that differ by roundings"
    assert numerics.fused_rel_l2 == pytest.approx(10 * UNIT / 2, rel=1e-3)
    assert not compared(12.0, 3.0, elsewhere=None).is_passed


@pytest.mark.parametrize(
    ("ours", "elsewhere"),
    [
        (20.0, ([20.0] * 8, USUAL)),  # less precise everywhere
        (60.0, (USUAL, USUAL)),  # wrong on the call's own inputs alone
        (12.0, ([10.0] * 7 + [60.0], USUAL)),  # wrong on one of the others
        (float("nan"), (USUAL, USUAL)),
        (12.0, ([10.0] * 7 + [float("inf")], USUAL)),
    ],
    ids=["less precise", "here alone", "elsewhere alone", "nan", "inf elsewhere"],
)
def test_what_is_wrong_does_not_pass_by_luck(ours, elsewhere):
    found = compared(ours, 3.0, elsewhere=elsewhere)
    assert not found.is_passed and not found.has_moved


def decay(step, rate):
    return torch.exp(step * -torch.exp(rate))


def rounded_otherwise(step, rate):
    """Three roundings of the exponent where the original has two: 1.2 of its typical error."""
    return torch.exp((step * 1.1) * (-torch.exp(rate.double()) / 1.1).to(torch.float32))


def less_precise(step, rate):
    inner = step.double() * -torch.exp(rate.double())
    return torch.exp(inner * (1 + 3 * UNIT)).to(torch.float32)


def off_at_one_element(step, rate):
    found = rounded_otherwise(step, rate)
    found.view(-1)[int(found.argmax())] *= 1 + 300 * UNIT
    return found


def test_a_decay_whose_largest_element_makes_up_its_error_is_judged_by_many_inputs():
    """exp(-dt·exp(a)), Mamba's: one element of 4,096 holds nearly all of the norm. 29 of 40 pass at once, 36 in all."""
    again, passed = 0, 0
    for seed in range(40):
        made = torch.Generator().manual_seed(seed)
        inputs = (torch.rand(64, 64, generator=made) * -20, torch.rand(64, 64, generator=made) * 1.4)
        chain = chain_of(decay, *inputs)
        numerics = check_calls([(chain, rounded_otherwise, inputs)], inputs="some")
        again += "medians" in numerics.inputs
        passed += numerics.is_passed
        for wrong in (less_precise, off_at_one_element):
            assert not check_calls([(chain, wrong, inputs)], inputs="some").is_passed, (seed, wrong.__name__)
    assert passed > 32 and again > 3


class Meets(OriginalChain):
    """A chain with an op that waits for other ranks."""

    meets_ranks = True


def test_a_chain_in_which_ranks_meet_runs_once_on_each():
    """What looks wrong on one rank may not on another: a second look would wait there for ranks that went on."""
    made = torch.Generator().manual_seed(0)
    inputs = (torch.rand(64, 64, generator=made) * -20, torch.rand(64, 64, generator=made) * 1.4)
    chain, runs = chain_of(decay, *inputs), []

    def wrong(step, rate):
        runs.append(1)
        return less_precise(step, rate)

    assert not check_calls([(chain, wrong, inputs)], inputs="some").is_passed and len(runs) > 1
    runs.clear()
    meets = Meets(**{one.name: getattr(chain, one.name) for one in fields(chain)})
    assert not check_calls([(meets, wrong, inputs)], inputs="some").is_passed and len(runs) == 1
    assert is_collective("_c10d_functional.all_reduce.default") and not is_collective("aten.sum.default")
