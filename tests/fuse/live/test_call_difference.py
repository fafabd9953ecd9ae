"""A call that was not verified is described by the tensor that differs."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.fuse.live.call_difference import describe_difference
from fusion_advisor.fuse.live.call_signature import signature


def key(*args, **kwargs):
    return signature(args, kwargs)


@pytest.mark.parametrize(
    ("mine", "verified", "says"),
    [
        (key(torch.zeros(8, 64)), [key(torch.zeros(8, 512))], "input 0 is [8, 64] float32, and [8, 512] float32 was verified"),
        (key(ids=torch.zeros(2).long()), [key(ids=torch.zeros(4).long())], "ids is [2] int64, and [4] int64 was verified"),
        (key(torch.zeros(3).half()), [key(torch.zeros(3))], "input 0 is [3] float16, and [3] float32 was verified"),
        (
            key(torch.zeros(4, 4).t()),
            [key(torch.zeros(4, 4))],
            "input 0 is [4, 4] float32 with strides [1, 4], and [4, 4] float32 with strides [4, 1] was verified",
        ),
        (key({"a": torch.zeros(1)}), [key({"a": torch.zeros(2)})], "input 0.a is [1] float32, and [2] float32 was verified"),
        (key([torch.zeros(1)]), [key([torch.zeros(2)])], "input 0[0] is [1] float32, and [2] float32 was verified"),
        (key(torch.zeros(1), True), [key(torch.zeros(1), False)], ""),
        (key(torch.zeros(1)), [key(torch.zeros(1), torch.zeros(1))], ""),
    ],
)  # fmt: skip
def test_the_first_tensor_that_differs_is_named(mine, verified, says):
    assert describe_difference(mine, verified) == says


def test_the_nearest_of_several_verified_calls_is_named():
    mine = key(torch.zeros(2, 8), mask=torch.zeros(8))
    others = [key(torch.zeros(1, 4), mask=torch.zeros(4)), key(torch.zeros(2, 8), mask=torch.zeros(9))]
    assert describe_difference(mine, others) == "mask is [8] float32, and [9] float32 was verified"
