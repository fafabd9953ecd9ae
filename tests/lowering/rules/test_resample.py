"""Images at another resolution, against torch in fp64: sizes and factors, corners, layouts, and where torch copies."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fusion_advisor.ir.dtypes import CannotLower
from tests.kernel_cases.lowered import check, lower_function
from tests.lowering.rules.test_tables import rand

LINEAR = {
    "to a size": {"size": (9, 13)},
    "by two": {"scale_factor": 2}, "by four": {"scale_factor": 4}, "by 1.7": {"scale_factor": 1.7},
    "to half": {"scale_factor": 0.5}, "to one": {"size": (1, 1)}, "one dim as it is": {"size": (6, 11)},
}  # fmt: skip


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["channels first", "channels last"])
@pytest.mark.parametrize("corners", [False, True], ids=["", "aligned corners"])
@pytest.mark.parametrize("name", LINEAR)
def test_bilinear(name, corners, layout):
    images = rand(2, 3, 6, 7).contiguous(memory_format=layout)
    check(lambda x: functional.interpolate(x, mode="bilinear", align_corners=corners, **LINEAR[name]) * 2, images)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["channels first", "channels last"])
@pytest.mark.parametrize("name", LINEAR)
def test_nearest(name, layout):
    images = rand(2, 3, 6, 7).contiguous(memory_format=layout)
    check(lambda x: functional.interpolate(x, mode="nearest", **LINEAR[name]) + 1, images)


def test_one_and_three_dims():
    check(lambda x: functional.interpolate(x, size=11, mode="linear") + 1, rand(2, 3, 7))
    check(lambda x: functional.interpolate(x, size=11, mode="nearest") + 1, rand(2, 3, 7))
    check(lambda x: functional.interpolate(x, scale_factor=2, mode="nearest") + 1, rand(1, 2, 3, 4, 5))
    check(lambda x: functional.interpolate(x, size=(4, 7, 5), mode="nearest") + 1, rand(1, 2, 3, 4, 5))


def test_nearest_by_a_whole_number_computes_no_position():
    program = check(lambda x: functional.interpolate(x, scale_factor=3, mode="nearest") + 1, rand(2, 3, 4, 5))
    assert not any(value.args for value in program.values if value.op == "load")


def test_positions_are_rounded_as_torch_rounds_them():
    """In fp32 ``position * (99 / 100)`` is a whole number for more positions than in fp64."""
    check(lambda x: functional.interpolate(x, size=100, mode="nearest") + 1, rand(1, 1, 99).float(), rtol=1e-6)
    check(lambda x: functional.interpolate(x, scale_factor=1.1, mode="nearest") + 1, rand(1, 1, 999).float(), rtol=1e-6)


def test_other_ways_are_refused():
    def resized(**how):
        return lambda x: functional.interpolate(x, size=(9, 9), **how) + 1

    for how in ({"mode": "bicubic"}, {"mode": "nearest-exact"}, {"mode": "bilinear", "antialias": True}):
        with pytest.raises(CannotLower):
            lower_function(resized(**how), rand(1, 2, 6, 7))


def test_what_is_computed_is_read_at_another_resolution():
    check(
        lambda x, y: torch.cat([functional.interpolate(torch.relu(x), size=(8, 8), mode="bilinear"), y * 2], 1),
        rand(2, 3, 4, 4), rand(2, 2, 8, 8),
    )  # fmt: skip
