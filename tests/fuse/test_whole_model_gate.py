"""The last gate: device time may not rise, and a kernel that waits for other ranks is no device time."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.fuse.whole_model_gate import comparable_device_ns, given_back, shortfall, why_nothing_stays
from fusion_advisor.records import ModelCheck, Status, StepProfile
from fusion_advisor.timing.wall_timer import as_timing
from fusion_advisor.verify.compare_models import check_model

SLOW, FAST = as_timing([15_500_000] * 6, "wall"), as_timing([7_780_000] * 6, "wall")


def step(compute_ns, between=(0, 0)):
    """A step with some nanoseconds of GEMMs, and so many kernels between ranks of so many nanoseconds."""
    count, ns = between
    rows = [("gemm", 58, compute_ns), *([("collective", count, ns)] if count else [])]
    return StepProfile(
        label="", device_ns=compute_ns + ns, launches=58 + count, categories=tuple(rows), kernels=(), wall=None
    )  # fmt: skip


def judge(before, after, *, wall_before=SLOW, wall_after=FAST):
    """What the gate says of two steps on a GPU."""
    device_ns = comparable_device_ns(before, after)
    before_ns, after_ns = device_ns or (0, 0)
    return why_nothing_stays(
        None, before_ns, after_ns, wall_before, wall_after, is_device_judged=device_ns is not None, is_time_judged=True
    )


def test_kernels_that_wait_for_other_ranks_revert_nothing():
    """Two H200s: 8.378 ms became 17.469, nearly all of it waiting in 17 all-reduces, while the step fell from 15.5 to 7.78 ms."""
    before, after = step(3_055_000, (17, 5_323_000)), step(2_700_000, (17, 14_769_000))
    assert after.device_ns > 2 * before.device_ns
    assert judge(before, after) is None


@pytest.mark.parametrize("between", [(0, 0), (17, 5_000_000)])
def test_compute_that_rises_reverts_everything(between):
    assert "device time would rise from 3.055 to 3.100 ms" in judge(step(3_055_000, between), step(3_100_000, between))


def test_kernels_that_took_over_what_ran_between_ranks_are_judged_by_the_wall():
    before, after = step(3_055_000, (17, 5_323_000)), step(6_000_000, (1, 300_000))
    assert judge(before, after) is None
    slower = as_timing([16_500_000] * 6, "wall")
    assert "the step would rise from 15.500 to 16.500 ms" in judge(before, after, wall_after=slower)


def test_a_step_of_microseconds_rises_by_a_number_that_is_seen():
    fast, slow = as_timing([20_391] * 6, "wall"), as_timing([22_980] * 6, "wall")
    refusal = judge(step(1_000, (0, 0)), step(900, (0, 0)), wall_before=fast, wall_after=slow)
    assert "from 20.391 to 22.980 µs" in refusal


def checked(*, off=0.0, spoilt=0, oracle="float64 copy"):
    """A check of two outputs, of which the second is off by a share, and NaN at some elements."""
    truth = torch.linspace(1, 2, 200, dtype=torch.float64)
    ours = (truth * (1 + off)).float()
    ours[:spoilt] = float("nan")
    rows = [[("a", truth.float()), ("b.0", second)] for second in (ours, truth.float(), truth)]
    return check_model(*rows, oracle)


def refusal_of(check: ModelCheck, captured: ModelCheck | None = None):
    return why_nothing_stays(check, 0, 0, SLOW, FAST, is_device_judged=False, is_time_judged=False, captured=captured)


def test_wrong_numbers_are_named_with_their_output_and_size():
    assert refusal_of(checked()) is None
    refusal = refusal_of(checked(off=0.01))
    assert "do not pass ('b.0' is 0.01 off a float64 copy, relative, and eager's 2" in refusal
    assert "'b.0' is 0.01 off eager's, relative" in refusal_of(checked(off=0.01, oracle="eager"))
    assert "(2 elements are NaN or infinite in eager's outputs alone or in ours alone, 'b.0' among them)" in refusal_of(
        checked(spoilt=2)
    )
    assert shortfall(checked(spoilt=1)).startswith("1 element is NaN")
    other = check_model([("a", torch.ones(3))], [("a", torch.ones(2))], [], "eager")
    assert shortfall(other) == "'a': another shape than eager's"


def test_a_capture_that_differs_from_the_model_is_named():
    refusal = refusal_of(checked(off=0.02), checked(off=0.01))
    assert refusal.startswith("dynamo's capture computes other numbers") and "'b.0' is 0.01 off" in refusal
    assert refusal_of(checked(off=0.02), checked()).startswith("the whole model's numbers do not pass ('b.0' is 0.02 off")


def test_what_was_given_back_is_slower_unless_its_numbers_failed():
    assert given_back(checked()) is given_back(None) is Status.SLOWER
    assert given_back(checked(spoilt=3)) is Status.NOT_REPLACED
