"""The printer table of C++: one row for each op of the kernel IR."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fusion_advisor.codegen.cpp.ops import (
    ATOM,
    COMPARE,
    HALVES,
    PRODUCT,
    REALS,
    SUM,
    TERNARY,
    UNARY,
    WRAPPING,
    Expr,
    Prelude,
    computed_in,
    convert,
    literal,
)
from fusion_advisor.ir.program import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An op with its printed arguments.

    Attributes:
        value: the op.
        args: its printed arguments.
        dtypes: the dtypes in which they are computed.
        sources: the arguments' values themselves; a constant exponent picks a cheaper power.
        prelude: takes note of the functions called.
        may_wrap: whether the result is an integer that may not fit 64 bits.
    """

    value: Value
    args: Sequence[Expr]
    dtypes: Sequence[str]
    sources: Sequence[Value]
    prelude: Prelude
    may_wrap: bool = False

    @property
    def compute_dtype(self) -> str:
        """The dtype in which the result is computed."""
        return computed_in(self.value.dtype)

    @property
    def is_real(self) -> bool:
        """Whether the result is a floating-point number."""
        return self.compute_dtype in REALS

    def converted(self) -> Call:
        """Return the same with all arguments in the result's dtype."""
        args = [convert(arg, dtype, self.compute_dtype, self.prelude) for arg, dtype in zip(self.args, self.dtypes, strict=True)]
        return replace(self, args=args)

    def function(self, name: str) -> Expr:
        """Call a prelude function with the arguments."""
        return self.prelude.call(name, *self.args)


Row = Callable[[Call], Expr]
"""How an op is printed."""


def operation(call: Call) -> Expr:
    """Print an arithmetic, comparison or logic op, or a cast.

    Raises:
        ValueError: the table has no row for the op.
    """
    row = ROWS.get(call.value.op)
    if row is None:
        raise ValueError(f"the C++ backend has no word for the op {call.value.op!r}")
    return row(call)


def _of_own_dtype(row: Row) -> Row:
    """Return the row of an op whose arguments are converted to the dtype of its result; integers that may overflow wrap."""

    def converted(call: Call) -> Expr:
        call = call.converted()
        if call.may_wrap and call.value.op in WRAPPING:
            return call.function(f"fa_wrapping_{call.value.op}")
        return row(call)

    return converted


def _infix(sign: str, rank: int) -> Row:
    # The right operand keeps its parentheses at equal rank: floating point does not associate.
    return lambda call: Expr(f"{call.args[0].at(rank)} {sign} {call.args[1].at(rank + 1)}", rank)


def _logic(sign: str) -> Row:
    # `&` and `|` on bool rather than `&&` and `||`: without a branch the loop vectorises.
    return lambda call: Expr(f"{call.args[0].at(UNARY)} {sign} {call.args[1].at(UNARY)}", TERNARY + 1)


def _std(function: str) -> Row:
    return lambda call: Expr(f"std::{function}({call.args[0].text})")


def _prelude(function: str) -> Row:
    return lambda call: call.function(function)


def _own_for_float(call: Call) -> Expr:
    """A prelude function in float32, whose loops vectorise; the standard library's in float64."""
    return call.function(f"fa_{call.value.op}") if call.compute_dtype == "float32" else _std(call.value.op)(call)


def _whole(function: str) -> Row:
    """Return the row of a rounding to whole numbers, which leaves integers alone."""
    return lambda call: _std(function)(call) if call.is_real else call.args[0]


def _cast(call: Call) -> Expr:
    value, prelude = call.value, call.prelude
    if value.dtype not in HALVES:
        return convert(call.args[0], call.dtypes[0], call.compute_dtype, prelude)
    half = convert(call.args[0], call.dtypes[0], value.dtype, prelude)
    return convert(half, value.dtype, "float32", prelude)


def _where(call: Call) -> Expr:
    condition, *choices = call.args
    chosen = [convert(a, d, call.compute_dtype, call.prelude) for a, d in zip(choices, call.dtypes[1:], strict=True)]
    return Expr(f"{condition.at(COMPARE)} ? {chosen[0].at(TERNARY + 1)} : {chosen[1].at(TERNARY + 1)}", TERNARY)


def _isnan(call: Call) -> Expr:
    return _std("isnan")(call) if call.dtypes[0] in REALS else Expr("false")


def _not(call: Call) -> Expr:
    return Expr(f"{'!' if call.compute_dtype == 'bool' else '~'}{call.args[0].at(UNARY)}", UNARY)


def _abs(call: Call) -> Expr:
    return _std("fabs" if call.is_real else "abs")(call)


def _larger_or_smaller(call: Call) -> Expr:
    if call.sources[1].op == "const":
        # Of two zeros eager's vectorised relu and clamp take the element's, and the helpers take the second.
        call = replace(call, args=call.args[::-1])
    return call.function("fa_max" if call.value.op == "maximum" else "fa_min")


def _erfc(call: Call) -> Expr:
    if call.compute_dtype != "float32":
        return _std("erfc")(call)
    if call.value.constant:  # 1 + erf: erfc's own digits would make GELU 1.7 times as slow
        return Expr(f"{literal(1, call.compute_dtype).text} - {call.function('fa_erf').text}", SUM)
    return call.function("fa_erfc")


def _reciprocal(call: Call) -> Expr:
    return Expr(f"{literal(1, call.compute_dtype).text} / {call.args[0].at(PRODUCT + 1)}", PRODUCT)


def _rsqrt(call: Call) -> Expr:
    return Expr(f"{literal(1, call.compute_dtype).text} / std::sqrt({call.args[0].text})", PRODUCT)


_CHEAP_POWERS: Mapping[float, Row] = {
    2: _prelude("fa_square"), 3: _prelude("fa_cube"), 0.5: _std("sqrt"), -0.5: _rsqrt, -1: _reciprocal,
}  # fmt: skip
"""Of real numbers, by the exponent."""


def _pow(call: Call) -> Expr:
    base, exponent = call.args[0], call.sources[1]
    fixed = exponent.constant if exponent.op == "const" and not isinstance(exponent.constant, bool) else None
    if not call.is_real:
        if fixed not in (2, 3):
            return call.function("fa_ipow")
        square = call.prelude.call("fa_wrapping_mul", base, base)
        return square if fixed == 2 else call.prelude.call("fa_wrapping_mul", square, base)
    if fixed is not None and fixed in _CHEAP_POWERS:
        return _CHEAP_POWERS[fixed](replace(call, args=[base]))
    return Expr(f"std::pow({base.text}, {call.args[1].text})")


ROWS: Mapping[str, Row] = {
    "cast": _cast,
    "where": _where,
    "quotient": lambda call: Expr(f"{call.args[0].at(PRODUCT)} / {call.args[1].at(ATOM)}", PRODUCT),
    "isnan": _isnan,
    "not": _not,
    "eq": _infix("==", COMPARE),
    "ne": _infix("!=", COMPARE),
    "lt": _infix("<", COMPARE),
    "le": _infix("<=", COMPARE),
    "gt": _infix(">", COMPARE),
    "ge": _infix(">=", COMPARE),
    **{
        op: _of_own_dtype(row)
        for op, row in {
            "add": _infix("+", SUM),
            "sub": _infix("-", SUM),
            "mul": _infix("*", PRODUCT),
            "div": _infix("/", PRODUCT),
            "and": _logic("&"),
            "or": _logic("|"),
            "xor": _logic("^"),
            "neg": lambda call: Expr(f"-{call.args[0].at(ATOM)}", UNARY),
            "pow": _pow,
            "rsqrt": _rsqrt,
            "reciprocal": _reciprocal,
            "abs": _abs,
            "floor": _whole("floor"),
            "ceil": _whole("ceil"),
            "trunc": _whole("trunc"),
            "round": _whole("rint"),
            "maximum": _larger_or_smaller,
            "minimum": _larger_or_smaller,
            "remainder": _prelude("fa_remainder"),
            "sign": _prelude("fa_sign"),
            "sigmoid": _prelude("fa_sigmoid"),
            "round_bfloat16": _prelude("fa_round_bf16"),
            "round_float16": _prelude("fa_round_fp16"),
            "erfc": _erfc,
            **dict.fromkeys(("sqrt", "sin", "cos"), lambda call: _std(call.value.op)(call)),
            **dict.fromkeys(("exp", "exp2", "expm1", "log", "log1p", "tanh", "erf"), _own_for_float),
        }.items()
    },
}
"""How C++ prints each op that is computed from its arguments; what stands for a place in memory or a loop is in ``scope``."""
UNPRINTED: Mapping[str, str] = {
    "normal_cdf": "only the GPU backends put it in, see codegen.common.gelu_cdf",
    "tanh_cdf": "only the GPU backends put it in, see codegen.common.gelu_cdf",
}
"""Ops without a row, with the reason."""
