"""Integers at the ends of their range, and numbers that a dtype cannot hold: served as eager serves them, or refused."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.lowering.rules.tables import CannotLower
from tests.kernel_cases.lowered import lower_function, run

DTYPES = {name: getattr(torch, name) for name in ("uint8", "int8", "int16", "int32", "int64")}
OPS = {
    "neg": lambda x: -x, "abs": lambda x: x.abs(), "sign": lambda x: x.sign(), "square": lambda x: x.square(),
    "add": lambda x: x + 3, "sub": lambda x: x - 3, "rsub": lambda x: 3 - x, "mul": lambda x: x * 3,
    "add_itself": lambda x: x + x,
    "mul_itself": lambda x: x * x, "clamp": lambda x: x.clamp(1, 5), "clamp_low": lambda x: x.clamp(min=-3),
    "remainder": lambda x: x.remainder(7),
    "remainder_minus": lambda x: x.remainder(-3), "relu": lambda x: x.relu(),
    "maximum": lambda x: torch.maximum(x, 3 - x), "eq": lambda x: x == 3, "lt_minus": lambda x: x < -3,
    "gt_far": lambda x: x > 300, "where": lambda x: torch.where(x > 3, x, 0), "masked_fill": lambda x: x.masked_fill(x > 3, -1),
    "add_far": lambda x: x + 300, "mul_far": lambda x: x * -300, "clamp_far": lambda x: x.clamp(max=300),
}  # fmt: skip
REFUSED = {
    "uint8": {"clamp_low", "remainder_minus", "lt_minus", "gt_far", "masked_fill", "add_far", "mul_far", "clamp_far"},
    "int8": {"gt_far", "add_far", "mul_far", "clamp_far"},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_integers_are_eager_s_or_refused(name, dtype):
    info = torch.iinfo(DTYPES[dtype])
    numbers = [info.min, info.min + 1, info.min // 2, 0, 1, 2, 3, 4, 100, info.max // 2, info.max - 1, info.max]
    x = torch.tensor(numbers, dtype=DTYPES[dtype])
    if name in REFUSED.get(dtype, ()):
        with pytest.raises(CannotLower, match="cannot hold"):
            lower_function(OPS[name], x)
        return
    lowered, ops = lower_function(OPS[name], x)
    want = OPS[name](x)
    assert torch.equal(run(lowered, ops, [x])[0].to(want.dtype), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_divisor_that_may_be_0_is_refused(dtype):
    x = torch.tensor([1, 2, 3], dtype=DTYPES[dtype])
    for function in (lambda x: x.remainder(x.clone()), lambda x: x.remainder(0)):
        with pytest.raises(CannotLower, match="may be 0"):
            lower_function(function, x)
