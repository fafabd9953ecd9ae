"""Find sums of exponentials that can be accumulated together with the maximum that they are shifted by.

``reduce_sum(exp(v - reduce_max(v)))`` reads a row twice when it is done as it is written. With a running maximum the sum so far
is rescaled whenever the maximum grows, and one read is enough: Milakov and Gimelshein, *Online normalizer calculation for
softmax*, https://arxiv.org/abs/1805.02867. Skeletons that walk a row more than once use it; a row that stays in registers is read
once anyway.

The running maximum starts at the lowest finite number, not at -inf: no difference is then inf - inf before the row's end, and an
element of -inf adds exp(-inf) = 0. What the finished pair must be follows from torch's own order of work:

- a row of -inf alone (its sum is still 0 at the end): the maximum is -inf, and the sum is NaN;
- a row with +inf: the sum is NaN, by inf - inf;
- a row with NaN: both are NaN.

``logsumexp`` shifts by 0 instead where the maximum is infinite: there the sum is 0 and inf in the first two rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusion_advisor.ir.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineSum:
    """Numbers of the values that one running pair replaces."""

    total: int
    """The ``reduce_sum``."""
    highest: int
    """The ``reduce_max``."""
    element: int
    """What the maximum is taken of."""
    exponential: int
    """What is summed: ``exp(element - shift)``."""
    is_finite: bool
    """Whether the shift is 0 where the maximum is infinite, as in ``logsumexp``; else it is the maximum."""


def online_sums(program: Program) -> tuple[OnlineSum, ...]:
    """Return the sums of exponentials of a reduced Program, at most one for each maximum."""
    values = program.values
    found: dict[int, OnlineSum] = {}
    for number, value in enumerate(values):
        if value.op != "reduce_sum" or values[value.args[0]].op != "exp":
            continue
        exponential = value.args[0]
        difference = values[values[exponential].args[0]]
        if difference.op != "sub":
            continue
        element, shift = difference.args
        highest = _maximum_of(program, shift)
        if highest is None or values[highest].args != (element,) or highest in found:
            continue
        found[highest] = OnlineSum(
            total=number, highest=highest, element=element, exponential=exponential, is_finite=highest != shift
        )
    return tuple(found.values())


def _maximum_of(program: Program, shift: int) -> int | None:
    """The maximum that a shift is: itself, or ``where(abs(maximum) == inf, 0, maximum)``."""
    values = program.values
    if values[shift].op == "reduce_max":
        return shift
    if values[shift].op != "where":
        return None
    condition, zero, highest = values[shift].args
    if values[highest].op != "reduce_max" or values[zero].op != "const" or values[zero].constant != 0:
        return None
    compared = {(values[n].op, values[n].args, values[n].constant) for n in values[condition].args}
    is_same = values[condition].op == "eq" and compared == {("abs", (highest,), None), ("const", (), math.inf)}
    return highest if is_same else None
