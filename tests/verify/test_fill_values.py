"""Fills of masked places: compared by themselves, and they hide no error of the numbers beside them."""

from __future__ import annotations

import math

import pytest
import torch

from fusion_advisor.verify.compare_models import check_model

TRUE = torch.randn(16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
MASK = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)) > 0.5
LEAST = "the dtype's least number"


def noisy(dtype, seed):
    noise = torch.randn(TRUE.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (TRUE * (1 + torch.finfo(dtype).eps * noise)).to(dtype)


def filled(tensor, fill):
    least = torch.finfo(tensor.dtype).min
    return tensor.masked_fill(MASK, least if fill is LEAST or -math.inf < fill < least else fill)


def check(ours, theirs, truth):
    return check_model([("scores", ours)], [("scores", theirs)], [("scores", truth)], "a wider copy")


@pytest.mark.parametrize("fill", [LEAST, -1e9, -1e4, -math.inf])
@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.float32, torch.float64), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
)
def test_numbers_beside_a_fill_are_held_to_eagers_error(dtype, wide, fill):
    ours, theirs, truth = (filled(one, fill) for one in (noisy(dtype, 2), noisy(dtype, 3), TRUE.to(wide)))
    found = check(ours, theirs, truth)
    assert found.is_passed and math.isfinite(found.fused_rel_l2)
    assert not check(torch.where(MASK, ours, ours * 1.05), theirs, truth).is_passed


@pytest.mark.parametrize("fill", [LEAST, -1e9, -1e4])
@pytest.mark.parametrize("other", [0.0, 1.01, -1.0, math.inf, math.nan])
def test_another_fill_is_refused(fill, other):
    ours, theirs, truth = (filled(one, fill) for one in (noisy(torch.float32, 2), noisy(torch.float32, 3), TRUE))
    ours[tuple(MASK.nonzero()[0].tolist())] *= other
    assert not check(ours, theirs, truth).is_passed


def test_an_overflow_of_eagers_is_no_fill():
    theirs, truth = noisy(torch.float16, 3), TRUE.float()
    theirs[0, 0], truth[0, 0] = math.inf, 1e6
    ours = noisy(torch.float16, 2)
    ours[0, 0] = math.inf
    assert check(ours, theirs, truth).is_passed
    ours[0, 0] = torch.finfo(torch.float16).max
    assert not check(ours, theirs, truth).is_passed


def test_large_numbers_of_all_sizes_are_no_fill():
    large = TRUE.abs() * 1e6
    assert check(large.float() * (1 + 1e-7), large.float(), large).outputs == ("scores",)
    assert check(filled(noisy(torch.float32, 2), -1e9), filled(noisy(torch.float32, 3), -1e9), filled(TRUE, -1e9)).outputs == (
        "scores", "scores where masked",
    )  # fmt: skip
