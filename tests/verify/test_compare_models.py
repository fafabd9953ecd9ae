"""Outputs of the whole model: eager's own error or the user's tolerance is the limit, and the worst output decides."""

from __future__ import annotations

import math

import pytest
import torch

from fusion_advisor.records import Tolerance
from fusion_advisor.verify.compare_models import check_model, factor_for

LOGITS = torch.randn(2, 3, 1200, dtype=torch.float64)


def rows(tensor):
    return [("logits", tensor.float()), ("ids", torch.arange(3))]


def test_the_whole_model_is_held_to_eagers_own_error():
    eager = LOGITS + 1e-5 * torch.randn_like(LOGITS)
    near = check_model(rows(LOGITS + 1e-5 * torch.randn_like(LOGITS)), rows(eager), rows(LOGITS), "float64 copy")
    assert near.is_passed and near.argmax_agreement == 1.0 and near.outputs == ("logits",)
    assert not check_model(rows(LOGITS + 1e-4 * torch.randn_like(LOGITS)), rows(eager), rows(LOGITS), "float64 copy").is_passed


def test_the_whole_model_is_held_to_a_tolerance():
    off = LOGITS + 1e-4
    tolerance = Tolerance(rtol=0.0, atol=2e-4)
    found = check_model(rows(off), rows(LOGITS), rows(LOGITS), "float64 copy", tolerance=tolerance)
    assert found.is_passed and found.limit == str(tolerance)
    assert not check_model(rows(off), rows(LOGITS), rows(LOGITS), "float64 copy").is_passed
    assert not check_model(rows(LOGITS + 3e-4), rows(LOGITS), rows(LOGITS), "eager", tolerance=tolerance).is_passed
    one_of_two = [("a", LOGITS.float()), ("b", LOGITS.float() + 1)]
    both = [("a", LOGITS.float()), ("b", LOGITS.float())]
    assert not check_model(one_of_two, both, both, "eager", tolerance=tolerance).is_passed


def test_outputs_of_other_shapes_fail_and_are_named():
    found = check_model([("logits", LOGITS), ("state", LOGITS[1:])], [("logits", LOGITS), ("state", LOGITS)], [], "eager")
    assert not found.is_passed
    assert (found.outputs, found.fused_rel_l2) == (("state",), float("inf"))


def test_counts_have_no_tolerance():
    counts, more = torch.arange(4.0).double(), torch.arange(4.0).double() + 1
    mine, theirs = [*rows(LOGITS), ("written counts", more)], [*rows(LOGITS), ("written counts", counts)]
    wide = Tolerance(rtol=10.0, atol=10.0)
    assert not check_model(mine, theirs, theirs, "eager", tolerance=wide, exact={"written counts"}).is_passed
    assert check_model(theirs, theirs, theirs, "eager", tolerance=wide, exact={"written counts"}).is_passed


def test_without_a_copy_eager_is_the_measure():
    eager = rows(LOGITS)
    assert check_model(eager, eager, eager, "eager").is_passed
    assert not check_model(rows(LOGITS * (1 + 1e-5)), eager, eager, "eager").is_passed


def test_one_nan_in_the_model_is_refused():
    spoiled = LOGITS.clone()
    spoiled[0, 0, 0] = math.nan
    found = check_model(rows(spoiled), rows(LOGITS), rows(LOGITS), "eager")
    assert found.nonfinite_mismatches == 1 and not found.is_passed


HALF = torch.float16


@pytest.mark.parametrize(
    ("mine", "eagers", "true", "is_passed"),
    [
        (250.0, math.inf, 250.0, True),  # a square overflowed on the way
        (0.0, math.nan, 0.0, True),
        (math.inf, math.nan, 1e5, True),  # float16 has no such number
        (math.nan, math.inf, math.nan, True),
        (260.0, math.inf, 250.0, False),
        (-250.0, math.inf, 250.0, False),
        (-math.inf, math.nan, 1e5, False),
        (250.0, math.inf, math.inf, False),
        (250.0, math.inf, math.nan, False),
        (math.inf, 250.0, 250.0, False),
        (math.nan, 250.0, math.nan, False),
        (math.inf, 250.0, math.inf, False),
        (math.nan, math.inf, 250.0, False),
    ],
)
def test_what_eager_alone_has_lost_may_be_the_oracles(mine, eagers, true, is_passed):
    """Only there: an element that the fused model alone has lost is refused, whatever the oracle has."""
    three = [LOGITS.to(HALF), LOGITS.to(HALF), LOGITS.float()]
    for one, value in zip(three, (mine, eagers, true), strict=True):
        one[0, 0, 1] = value
    fused, eager, oracle = ([("logits", one)] for one in three)
    found = check_model(fused, eager, oracle, "float32 copy")
    assert found.is_passed is is_passed and (found.nonfinite_mismatches == 0) is is_passed
    assert not check_model(fused, eager, eager, "eager").is_passed


def test_the_worst_output_decides():
    good, bad = LOGITS.float(), (LOGITS + 0.1).float()
    found = check_model([("a", good), ("b", bad)], [("a", good), ("b", good)], [("a", LOGITS), ("b", LOGITS)], "float64 copy")
    assert not found.is_passed


def test_a_model_without_floats_has_nothing_to_check():
    with pytest.raises(ValueError, match="no floating"):
        check_model([("ids", torch.arange(3))], [("ids", torch.arange(3))], [("ids", torch.arange(3))], "eager")


def test_the_five_likeliest_tokens_may_come_in_any_order():
    logits = torch.zeros(2, 4, 2000)
    logits[..., :5] = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    swapped, other = logits.clone(), logits.clone()
    swapped[0, 0, :2] = swapped[0, 0, :2].flip(0)
    other[0, 0, 4], other[0, 0, 7] = 0.0, 1.0

    def checked(fused):
        return check_model([("logits", fused)], [("logits", logits)], [("logits", logits.double())], "float64 copy")

    assert (checked(swapped).argmax_agreement, checked(swapped).top5_agreement) == (7 / 8, 1.0)
    assert (checked(other).argmax_agreement, checked(other).top5_agreement) == (1.0, 7 / 8)
    small = [("features", torch.ones(2, 8))]
    assert check_model(small, small, [("features", torch.ones(2, 8).double())], "float64 copy").top5_agreement is None


@pytest.mark.parametrize("count", [4, 16, 60, 4096])
def test_equally_exact_models_pass_whatever_the_number_of_outputs(count):
    generator = torch.Generator().manual_seed(count)
    ours, theirs = (torch.randn(4000, count, generator=generator).square().mean(1).sqrt() for _ in range(2))
    assert (ours / theirs > factor_for(count)).float().mean() < 0.004
    assert (1.05 * factor_for(count) * theirs > ours).float().mean() > 0.99


def test_an_output_of_many_numbers_may_be_off_half_as_much_again():
    assert factor_for(100) == factor_for(10**6) == 1.5
    assert factor_for(1) == 8.0


def test_a_few_numbers_pass_where_they_differ_by_chance_and_not_where_they_are_wrong():
    truth = torch.tensor([[0.5, -0.25], [1.0, 2.0]], dtype=torch.float64)
    theirs = (truth * (1 + 1.8e-7)).to(torch.float32)
    near, wrong = ((truth * (1 + off)).to(torch.float32) for off in (4e-7, 1e-5))
    for ours, is_right in ((near, True), (wrong, False)):
        check = check_model([("logits", ours)], [("logits", theirs)], [("logits", truth)], "float64 copy")
        assert check.is_passed == is_right
    assert "4 numbers say little of it" in check.limit


def test_where_eager_has_no_digit_right_its_noise_is_the_limit_eight_times():
    truth = torch.zeros(1000, dtype=torch.float64) + 1e-20
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-9

    def found(times):
        rows = [("gradient", noise * times)], [("gradient", noise)], [("gradient", truth)]
        return check_model(*rows, "float64")

    assert found(7).is_passed and "no digit right" in found(7).limit
    assert not found(9).is_passed


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_of_eight_bits_are_compared_like_others(dtype):
    rounded = LOGITS.to(dtype)
    other = LOGITS.roll(1, -1)
    for oracle, name in ((LOGITS, "float32 copy"), (rounded, "eager")):
        assert check_model([("codes", rounded)], [("codes", rounded)], [("codes", oracle)], name).is_passed
        assert not check_model([("codes", other.to(dtype))], [("codes", rounded)], [("codes", oracle)], name).is_passed
