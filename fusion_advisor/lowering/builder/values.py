"""Values of a program under construction: appended once each, with algebra that changes no bits folded on the way."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

from fusion_advisor.ir.program import COMMUTATIVE, Value

_FOLDED: dict[str, Callable[..., bool]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
"""Comparisons that are folded where both sides are known whole numbers."""


class Values:
    """Appends SSA values; equal ones get one number.

    Attributes:
        is_exact: every result is rounded as eager rounds it, so that no algebra moves a rounding.
        values: in the order of their numbers.
    """

    def __init__(self, *, is_exact: bool) -> None:
        self.is_exact = is_exact
        self.values: list[Value] = []
        self._number_of: dict[tuple[Value, str], int] = {}

    def emit(self, value: Value) -> int:
        """Append a value, or return the number it already has."""
        key = (value, str(value.constant))  # 0.0 and -0.0 are equal
        number = self._number_of.get(key)
        if number is None:
            number = len(self.values)
            self.values.append(value)
            self._number_of[key] = number
        return number

    def const(self, constant: float | int | bool, dtype: str) -> int:
        """Append a constant of a compute dtype."""
        typed = bool(constant) if dtype == "bool" else int(constant) if dtype == "int64" else float(constant)
        return self.emit(Value(op="const", constant=typed, dtype=dtype))

    def constant_of(self, number: int) -> float | int | bool | None:
        """Return a value's constant, or None when it is not one."""
        value = self.values[number]
        return value.constant if value.op == "const" else None

    def make(self, op: str, *args: int, dtype: str | None = None) -> int:
        """Append an operation, folding what is known now; identities that change no bits are dropped."""
        constants = [self.constant_of(arg) for arg in args]
        if op in ("mul", "div") and len(args) == 2 and _is_number(constants[1], 1.0):
            return args[0]
        if op == "mul" and _is_number(constants[0], 1.0):
            return args[1]
        if self.is_exact and op in ("add", "sub", "mul", "div") and self.values[args[0]].dtype.startswith("float"):
            return self.emit(Value(op=op, args=args, dtype=dtype or self.values[args[0]].dtype))
        if (op == "add" and _adds_nothing(constants[1])) or (op == "sub" and _takes_nothing(constants[1])):
            return args[0]
        if op == "add" and _adds_nothing(constants[0]):
            return args[1]
        if op == "div" and self._is_softmax_sum(args[1]):
            # Of a masked row most quotients are 0 / sum, and IEEE division of 0 leaves its fast path: on an H200 the kernel took
            # 2.4 times as long as where nothing was masked. The sum is 1 at least, so that its reciprocal is a finite number.
            return self.make("mul", args[0], self.make("reciprocal", args[1]))
        if op in ("add", "mul", "sub") and all(constant is not None for constant in constants):
            left, right = constants
            assert left is not None and right is not None
            folded = {"add": left + right, "mul": left * right, "sub": left - right}[op]
            return self.const(folded, self.values[args[0]].dtype)
        if op in _FOLDED and all(isinstance(constant, int) for constant in constants):
            return self.const(_FOLDED[op](*constants), "bool")
        if op in ("and", "or") and any(constant is not None for constant in constants):
            known, other = (args[0], args[1]) if constants[0] is not None else (args[1], args[0])
            return other if self.constant_of(known) is (op == "and") else known
        if op == "where" and constants[0] is not None:
            return args[1] if constants[0] else args[2]
        if op in ("where", "not") and self.values[args[0]].op == "not" and self.values[args[0]].dtype == "bool":
            inner = self.values[args[0]].args[0]
            return inner if op == "not" else self.make("where", inner, args[2], args[1], dtype=dtype)
        if op == "not" and constants[0] is not None and dtype == "bool":
            return self.const(not constants[0], "bool")
        if op == "add":
            for one, other in ((args[0], args[1]), (args[1], args[0])):
                # 1 + erf(u) = erfc(−u), which keeps its digits where the sum cancels.
                if _is_number(self.constant_of(one), 1.0) and self.values[other].op == "erf":
                    negated = self._negated(self.values[other].args[0])
                    return self.emit(Value(op="erfc", args=(negated,), constant=True, dtype=self.values[negated].dtype))
                # 1 + tanh(u) = 2·sigmoid(2u): one op fewer, and exact where 1 + tanh cancels.
                if _is_number(self.constant_of(one), 1.0) and self.values[other].op == "tanh":
                    inner = self.values[other].args[0]
                    dtype_inner = self.values[inner].dtype
                    doubled = self.make("mul", inner, self.const(2.0, dtype_inner))
                    return self.make("mul", self.make("sigmoid", doubled), self.const(2.0, dtype_inner))
        if op == "mul":
            # (a·c)·d = a·(c·d) when one of the constants is a power of two: no rounding moves.
            for one, other in ((args[0], args[1]), (args[1], args[0])):
                outer = self.constant_of(one)
                inner_value = self.values[other]
                if isinstance(outer, float) and inner_value.op == "mul" and inner_value.dtype == self.values[one].dtype:
                    for kept, scaled in (inner_value.args, inner_value.args[::-1]):
                        factor = self.constant_of(scaled)
                        if isinstance(factor, float) and (_is_power_of_two(outer) or _is_power_of_two(factor)):
                            return self.make("mul", kept, self.const(outer * factor, self.values[one].dtype))
            pulled = self._pull_power_of_two(args)
            if pulled is not None:
                return pulled
        result = dtype or self.values[args[0]].dtype
        if op in COMMUTATIVE:
            args = tuple(sorted(args))
        return self.emit(Value(op=op, args=args, dtype=result))

    def _is_softmax_sum(self, number: int) -> bool:
        """Whether a value is a float32 sum of exp(v − max(v)) over v: its largest term is exp(0)."""
        total = self.values[number]
        if total.op != "reduce_sum" or total.dtype != "float32" or self.values[total.args[0]].op != "exp":
            return False
        shifted = self.values[self.values[total.args[0]].args[0]]
        if shifted.op != "sub":
            return False
        element, highest = shifted.args
        return self.values[highest].op == "reduce_max" and self.values[highest].args == (element,)

    def _negated(self, number: int) -> int:
        """A value with its sign changed; a constant factor takes the sign."""
        value = self.values[number]
        for kept, scaled in (value.args, value.args[::-1]) if value.op == "mul" else ():
            factor = self.constant_of(scaled)
            if isinstance(factor, float):
                return self.make("mul", kept, self.const(-factor, value.dtype))
        return self.make("neg", number)

    def _pull_power_of_two(self, args: Sequence[int]) -> int | None:
        """(x·2ⁿ)·(y·2ᵐ) = x·y·2ⁿ⁺ᵐ, so that GELU's 0.5·x·(2·sigmoid) loses both factors."""
        factors, rest = 1.0, []
        for arg in args:
            value = self.values[arg]
            found = None
            if value.op == "mul" and value.dtype in ("float32", "float64"):
                for kept, scaled in (value.args, value.args[::-1]):
                    factor = self.constant_of(scaled)
                    if isinstance(factor, float) and _is_power_of_two(factor):
                        found = (kept, factor)
            rest.append(found[0] if found else arg)
            factors *= found[1] if found else 1.0
        if rest == list(args) or len([1 for before, after in zip(args, rest, strict=True) if before != after]) < 2:
            return None
        product = self.make("mul", *rest)
        return self.make("mul", product, self.const(factors, self.values[product].dtype))

    def cast(self, number: int, dtype: str) -> int:
        """Convert between compute dtypes; fp32 and fp64 mix only when the chain is fp64."""
        have = self.values[number].dtype
        if have == dtype:
            return number
        constant = self.constant_of(number)
        if constant is not None:
            return self.const(constant, dtype)
        return self.emit(Value(op="cast", args=(number,), dtype=dtype))


def _is_number(constant: float | int | bool | None, wanted: float) -> bool:
    return constant is not None and not isinstance(constant, bool) and constant == wanted


def _adds_nothing(constant: float | int | bool | None) -> bool:
    """Whether a sum is its other side whatever that is: -0.0 + 0.0 is 0.0."""
    return _is_number(constant, 0.0) and (isinstance(constant, int) or str(constant) == "-0.0")


def _takes_nothing(constant: float | int | bool | None) -> bool:
    """Whether a difference is its left side whatever that is: -0.0 - -0.0 is 0.0."""
    return _is_number(constant, 0.0) and (isinstance(constant, int) or str(constant) == "0.0")


def _is_power_of_two(number: float) -> bool:
    return number != 0 and math.isfinite(number) and abs(math.frexp(number)[0]) == 0.5
