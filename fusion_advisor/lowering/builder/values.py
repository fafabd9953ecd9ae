"""Values of a program under construction: appended once each, with algebra that changes no bits folded on the way."""

from __future__ import annotations

from fusion_advisor.ir.program import COMMUTATIVE, REDUCTIONS, Value
from fusion_advisor.lowering.builder.algebra import FOLDS


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
        for fold in FOLDS.get(op, ()):
            folded = fold(self, op, args, dtype)
            if folded is not None:
                return folded
        if op in COMMUTATIVE:
            args = tuple(sorted(args))
        return self.emit(Value(op=op, args=args, dtype=dtype or self.values[args[0]].dtype))

    def cast(self, number: int, dtype: str) -> int:
        """Convert between compute dtypes; fp32 and fp64 mix only when the chain is fp64."""
        have = self.values[number].dtype
        if have == dtype:
            return number
        constant = self.constant_of(number)
        if constant is not None:
            return self.const(constant, dtype)
        return self.emit(Value(op="cast", args=(number,), dtype=dtype))


def has_reduction(values: Values, number: int) -> bool:
    """Whether a value is made of a reduction, which reads whole rows whatever the guard of its reader says."""
    waiting, seen = [number], {number}
    while waiting:
        value = values.values[waiting.pop()]
        if value.op in REDUCTIONS:
            return True
        fresh = {*value.args, *(() if value.guard is None else (value.guard,))} - seen
        seen |= fresh
        waiting += fresh
    return False
