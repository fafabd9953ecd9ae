"""Algebra that changes no bits, by op: what is known while a program is built is folded before it is appended.

A fold gets the values so far, the op, its arguments' numbers and the dtype that was asked for. It returns the number of the value
that stands for the result, or None where it does not apply. The folds of an op are tried in order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from fusion_advisor.ir.program import Value

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.values import Values

Fold = Callable[["Values", str, tuple[int, ...], "str | None"], "int | None"]

_COMPARED: dict[str, Callable[..., bool]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
_COMPUTED: dict[str, Callable[..., float]] = {"add": operator.add, "mul": operator.mul, "sub": operator.sub}


def _times_one(values: Values, op: str, args: tuple[int, ...], _dtype: str | None) -> int | None:
    if _is_number(values.constant_of(args[1]), 1.0):
        return args[0]
    return args[1] if op == "mul" and _is_number(values.constant_of(args[0]), 1.0) else None


def _exact(values: Values, op: str, args: tuple[int, ...], dtype: str | None) -> int | None:
    """In exact mode no algebra moves a rounding."""
    own = values.values[args[0]].dtype
    return values.emit(Value(op=op, args=args, dtype=dtype or own)) if values.is_exact and own.startswith("float") else None


def _plus_nothing(values: Values, _op: str, args: tuple[int, ...], _dtype: str | None) -> int | None:
    if _adds_nothing(values.constant_of(args[1])):
        return args[0]
    return args[1] if _adds_nothing(values.constant_of(args[0])) else None


def _minus_nothing(values: Values, _op: str, args: tuple[int, ...], _dtype: str | None) -> int | None:
    return args[0] if _takes_nothing(values.constant_of(args[1])) else None


def _of_constants(values: Values, op: str, args: tuple[int, ...], _dtype: str | None) -> int | None:
    left, right = (values.constant_of(arg) for arg in args)
    return None if left is None or right is None else values.const(_COMPUTED[op](left, right), values.values[args[0]].dtype)


def _over_softmax_sum(values: Values, _op: str, args: tuple[int, ...], _dtype: str | None) -> int | None:
    """Multiply with the reciprocal of a softmax's sum.

    Of a masked row most quotients are 0 / sum, and IEEE division of 0 leaves its fast path: on an H200 the kernel took 2.4 times
    as long as where nothing was masked. The sum is 1 at least, so that its reciprocal is a finite number.
    """
    if not _is_softmax_sum(values, args[1]):
        return None
    return values.make("mul", args[0], values.make("reciprocal", args[1]))


def _is_softmax_sum(values: Values, number: int) -> bool:
    """Whether a value is a float32 sum of exp(v − max(v)) over v: its largest term is exp(0)."""
    total = values.values[number]
    if total.op != "reduce_sum" or total.dtype != "float32" or values.values[total.args[0]].op != "exp":
        return False
    shifted = values.values[values.values[total.args[0]].args[0]]
    if shifted.op != "sub":
        return False
    element, highest = shifted.args
    return values.values[highest].op == "reduce_max" and values.values[highest].args == (element,)


def _comparison(values: Values, op: str, args: tuple[int, ...], _dtype: str | None) -> int | None:
    """A comparison whose two sides are known whole numbers."""
    constants = [values.constant_of(arg) for arg in args]
    is_known = all(isinstance(constant, int) for constant in constants)
    return values.const(_COMPARED[op](*constants), "bool") if is_known else None


def _known_side(values: Values, op: str, args: tuple[int, ...], _dtype: str | None) -> int | None:
    """``and`` and ``or`` of a constant: the other side, or the constant."""
    constants = [values.constant_of(arg) for arg in args]
    if all(constant is None for constant in constants):
        return None
    known, other = (args[0], args[1]) if constants[0] is not None else (args[1], args[0])
    return other if values.constant_of(known) is (op == "and") else known


def _known_choice(values: Values, _op: str, args: tuple[int, ...], _dtype: str | None) -> int | None:
    condition = values.constant_of(args[0])
    return None if condition is None else args[1] if condition else args[2]


def _choice_by_not(values: Values, _op: str, args: tuple[int, ...], dtype: str | None) -> int | None:
    inner = _inverted(values, args[0])
    return None if inner is None else values.make("where", inner, args[2], args[1], dtype=dtype)


def _not_not(values: Values, _op: str, args: tuple[int, ...], _dtype: str | None) -> int | None:
    return _inverted(values, args[0])


def _known_not(values: Values, _op: str, args: tuple[int, ...], dtype: str | None) -> int | None:
    constant = values.constant_of(args[0])
    return None if constant is None or dtype != "bool" else values.const(not constant, "bool")


def _inverted(values: Values, number: int) -> int | None:
    """What a boolean value is the inverse of."""
    value = values.values[number]
    return value.args[0] if value.op == "not" and value.dtype == "bool" else None


def _one_plus(values: Values, _op: str, args: tuple[int, ...], _dtype: str | None) -> int | None:
    for one, other in (args, args[::-1]):
        if not _is_number(values.constant_of(one), 1.0):
            continue
        function = values.values[other]
        if function.op == "erf":  # 1 + erf(u) = erfc(−u), which keeps its digits where the sum cancels
            negated = _negated(values, function.args[0])
            return values.emit(Value(op="erfc", args=(negated,), constant=True, dtype=values.values[negated].dtype))
        if function.op == "tanh":  # 1 + tanh(u) = 2·sigmoid(2u): one op fewer, and exact where 1 + tanh cancels
            inner = function.args[0]
            two = values.const(2.0, values.values[inner].dtype)
            return values.make("mul", values.make("sigmoid", values.make("mul", inner, two)), two)
    return None


def _negated(values: Values, number: int) -> int:
    """A value with its sign changed; a constant factor takes the sign."""
    value = values.values[number]
    for kept, factor in _scaled_by_constant(values, number):
        return values.make("mul", kept, values.const(-factor, value.dtype))
    return values.make("neg", number)


def _scaled_twice(values: Values, _op: str, args: tuple[int, ...], _dtype: str | None) -> int | None:
    """(a·c)·d = a·(c·d) when one of the constants is a power of two: no rounding moves, as long as c·d is a normal number."""
    for one, other in (args, args[::-1]):
        outer, dtype = values.constant_of(one), values.values[one].dtype
        if not isinstance(outer, float) or values.values[other].dtype != dtype:
            continue
        for kept, factor in _scaled_by_constant(values, other):
            is_exact = _is_power_of_two(outer) or _is_power_of_two(factor)
            if is_exact and _is_normal(outer * factor, dtype):
                return values.make("mul", kept, values.const(outer * factor, dtype))
    return None


def _both_scaled(values: Values, _op: str, args: tuple[int, ...], _dtype: str | None) -> int | None:
    """(x·2ⁿ)·(y·2⁻ᵐ) = x·(y·2ⁿ⁻ᵐ), with what is left on the side whose power is the larger one.

    So GELU's (0.5·x)·(2·sigmoid) loses both factors. Two powers of one sign stay: (x·2⁻²⁰)² is a number where x² is none.
    """
    (left, one), (right, other) = (_power_of_two(values, arg) for arg in args)
    if (abs(one) - 1.0) * (abs(other) - 1.0) >= 0.0:
        return None
    if one * other != 1.0:
        rest = values.const(one * other, values.values[left].dtype)
        is_left_larger = abs(math.log2(abs(one))) > abs(math.log2(abs(other)))
        left, right = (values.make("mul", left, rest), right) if is_left_larger else (left, values.make("mul", right, rest))
    return values.make("mul", left, right)


def _power_of_two(values: Values, number: int) -> tuple[int, float]:
    """A float as another value times a power of two; times 1 where it is no such product."""
    if values.values[number].dtype in ("float32", "float64"):
        for kept, constant in _scaled_by_constant(values, number):
            if _is_power_of_two(constant):
                return kept, constant
    return number, 1.0


def _scaled_by_constant(values: Values, number: int) -> Iterator[tuple[int, float]]:
    """The readings of a product as a value times a constant."""
    value = values.values[number]
    for kept, scaled in (value.args, value.args[::-1]) if value.op == "mul" else ():
        factor = values.constant_of(scaled)
        if isinstance(factor, float):
            yield kept, factor


def _is_number(constant: float | int | bool | None, wanted: float) -> bool:
    return constant is not None and not isinstance(constant, bool) and constant == wanted


def _adds_nothing(constant: float | int | bool | None) -> bool:
    """Whether a sum with a constant is its other side: -0.0 + 0.0 is 0.0."""
    return _is_number(constant, 0.0) and (isinstance(constant, int) or str(constant) == "-0.0")


def _takes_nothing(constant: float | int | bool | None) -> bool:
    """Whether a difference with a constant is its left side: -0.0 - -0.0 is 0.0."""
    return _is_number(constant, 0.0) and (isinstance(constant, int) or str(constant) == "0.0")


def _is_power_of_two(number: float) -> bool:
    return number != 0 and math.isfinite(number) and abs(math.frexp(number)[0]) == 0.5


def _is_normal(number: float, dtype: str) -> bool:
    limit = 126 if dtype == "float32" else 1022
    return 2.0**-limit <= abs(number) <= 2.0**limit


FOLDS: dict[str, Sequence[Fold]] = {
    "add": (_exact, _plus_nothing, _of_constants, _one_plus),
    "sub": (_exact, _minus_nothing, _of_constants),
    "mul": (_times_one, _exact, _of_constants, _scaled_twice, _both_scaled),
    "div": (_times_one, _exact, _over_softmax_sum),
    **dict.fromkeys(_COMPARED, (_comparison,)),
    "and": (_known_side,),
    "or": (_known_side,),
    "where": (_known_choice, _choice_by_not),
    "not": (_not_not, _known_not),
}
"""The folds of each op, in the order in which they are tried."""
