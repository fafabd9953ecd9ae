"""Which values the elements of a result may have: numbers, minus infinity too, or anything; and their sign."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fusion_advisor.fuse.dependence.call import Call
from fusion_advisor.fuse.dependence.kept import Kept, Sign, Span, Where


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CASTS = _words("to _to_copy type_as clone contiguous detach alias lift_fresh lift_fresh_copy")
FINITE_OPS = CASTS | _words(
    "abs atan ceil celu clamp clamp_max clamp_min clip cos cosh elu erf erfc exp exp2 expm1 floor gelu hardshrink hardsigmoid "
    "hardswish hardtanh leaky_relu log_sigmoid mish neg relu relu6 round selu sgn sigmoid sign silu sin sinh softplus softshrink "
    "square tanh trunc add sub rsub mul maximum minimum fmax fmin where masked_fill heaviside threshold lerp addcmul nan_to_num "
    "dropout"
)
"""Of finite numbers they give finite ones."""
INFINITE_AT_ZERO = _words("rsqrt reciprocal log log2 log10")
OTHER_OPS = _words(
    "acos acosh addcdiv angle asin asinh atan2 bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift "
    "bitwise_xor __and__ __or__ __xor__ __lshift__ __rshift__ copysign deg2rad digamma div true_divide divide erfinv eq fmod ge "
    "gt hypot i0 isfinite isinf isnan isneginf isposinf le ldexp lgamma log1p logaddexp logaddexp2 logical_and logical_not "
    "logical_or logical_xor logit lt ne polygamma pow rad2deg remainder signbit sinc sqrt tan xlogy multiply subtract "
    "floor_divide conj conj_physical _conj resolve_conj resolve_neg"
)
_NOT_NEGATIVE = _words("abs square relu relu6 sigmoid exp exp2 softplus hardsigmoid cosh sqrt rsqrt")


@dataclass(frozen=True, slots=True)
class Seen:
    """An operand at some elements."""

    number: Any
    span: Span
    sign: Sign


def seen_at(call: Call, own: Mapping[Node, Kept], value: Any, where: Where | None) -> Seen:
    """Return what is known of an argument at some elements; None: at all of them."""
    if isinstance(value, Node) and value in own:
        one = own[value]
        number = one.fill if where is None else one.known(where)
        span = one.span
        if where is not None and where.is_diagonal and (where.row, where.col) in one.live:
            span = Span.FINITE
        return Seen(number, span if number is None else _span_of(number), one.sign if number is None else _sign_of(number))
    number = call.size(value)
    if isinstance(number, bool | int | float):
        return Seen(number, _span_of(number), _sign_of(number))
    return Seen(None, Span.FINITE if number is not None else Span.ANY, Sign.ANY)


def _span_of(number: Any) -> Span:
    return Span.FINITE if math.isfinite(number) else Span.FINITE_OR_MINUS_INFINITY if number == -math.inf else Span.ANY


def _sign_of(number: Any) -> Sign:
    return Sign.POSITIVE if number > 0 else Sign.NOT_NEGATIVE if number == 0 else Sign.ANY


def operands_of(call: Call) -> list[Any]:
    """Return the op's operands, tensors and numbers, without its options."""
    skipped = {"dtype", "layout", "device", "pin_memory", "non_blocking", "copy", "memory_format", "rounding_mode", "approximate"}
    return [value for name, value in call.given.items() if name not in skipped]


def chosen(name: str, seen: Sequence[Seen]) -> tuple[Seen, Seen, Seen]:
    """Return the mask of a choice, and what is chosen where it is set and where it is not."""
    return (seen[0], seen[1], seen[2]) if name == "where" else (seen[1], seen[2], seen[0])


def span_at(call: Call, own: Mapping[Node, Kept], where: Where | None) -> Span:
    """Return which values elements of the result may have; None: all of them."""
    if not call.values[0].is_floating_point():
        return Span.ANY if call.values[0].is_complex() else Span.FINITE
    name, seen = call.name, [seen_at(call, own, value, where) for value in operands_of(call)]
    if name in CASTS:
        return seen[0].span
    if name in ("where", "masked_fill"):
        mask, yes, no = chosen(name, seen)
        return max(yes.span, no.span) if mask.number is None else (yes if mask.number else no).span
    given = [one for one, value in zip(seen, operands_of(call), strict=True) if value is not None]
    worst = max((one.span for one in given), default=Span.ANY)
    if worst is Span.FINITE:
        return Span.FINITE if _stays_finite(name, seen) else Span.ANY
    is_sum = name == "add" or (name == "sub" and seen[1].span is Span.FINITE)
    is_known = (is_sum and call.number("alpha", 1) == 1) or name in ("maximum", "minimum")
    return worst if worst is Span.FINITE_OR_MINUS_INFINITY and is_known else Span.ANY


def _stays_finite(name: str, seen: Sequence[Seen]) -> bool:
    """Whether an op gives finite numbers, given that its operands are."""
    first = seen[0]
    if name == "pow":
        power = seen[1].number
        return power is not None and power >= 0 and (float(power).is_integer() or first.sign >= Sign.NOT_NEGATIVE)
    if name in ("div", "true_divide", "divide"):
        return seen[1].sign is Sign.POSITIVE or bool(seen[1].number)
    if name in ("sqrt", "log1p"):
        return first.sign >= Sign.NOT_NEGATIVE
    return name in FINITE_OPS or (name in INFINITE_AT_ZERO and first.sign is Sign.POSITIVE)


def sign_of(call: Call, own: Mapping[Node, Kept]) -> Sign:
    """Return what is known of the signs of a result."""
    name, arguments = call.name, operands_of(call)
    seen = [seen_at(call, own, value, None) for value in arguments]
    if call.values[0].dtype in (torch.bool, torch.uint8):
        return Sign.NOT_NEGATIVE
    if name in CASTS:
        return min(seen[0].sign, Sign.NOT_NEGATIVE)
    if name in ("add", "mul") and len(seen) > 1:
        signs = sorted(one.sign for one in seen[:2])
        if name == "add":
            is_least = signs[0] >= Sign.NOT_NEGATIVE and call.number("alpha", 1) == 1
            return Sign.ANY if not is_least else Sign.NOT_NEGATIVE if _vanishes(call, arguments[1]) else signs[1]
        is_square = arguments[0] is arguments[1]
        return Sign.NOT_NEGATIVE if signs[0] >= Sign.NOT_NEGATIVE or is_square else Sign.ANY
    if name == "pow":
        power = seen[1].number
        is_even = isinstance(power, int | float) and power % 2 == 0
        return Sign.NOT_NEGATIVE if is_even or seen[0].sign >= Sign.NOT_NEGATIVE else Sign.ANY
    if name in ("clamp", "clamp_min", "clip"):
        least = seen_at(call, own, call.get("min"), None)
        return (
            least.sign if call.get("max") is None or seen_at(call, own, call.get("max"), None).sign is Sign.POSITIVE else Sign.ANY
        )
    if name == "where":
        return min(seen[1].sign, seen[2].sign)
    if name == "div" and call.get("rounding_mode") in (None, "floor", "trunc"):
        return Sign.NOT_NEGATIVE if min(seen[0].sign, seen[1].sign) >= Sign.NOT_NEGATIVE else Sign.ANY
    return Sign.NOT_NEGATIVE if name in _NOT_NEGATIVE else Sign.ANY


def _vanishes(call: Call, number: Any) -> bool:
    """Whether a number is zero in the result's type: 1e-12 is, in float16."""
    return isinstance(number, float) and torch.full((), number, dtype=call.values[0].dtype).item() == 0
