"""Ops that make each element of their result from the same element of their arguments."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fusion_advisor.ir.affine_index import Index
from fusion_advisor.ir.dtypes import FLOATS, CannotLower, argument_of, compute_dtype
from fusion_advisor.lowering.builder.builder import Rule
from fusion_advisor.lowering.builder.causal_compare import compared
from fusion_advisor.lowering.builder.integers import in_range
from fusion_advisor.lowering.builder.promotion import common_dtype
from fusion_advisor.lowering.builder.rounding import rounded_scalar
from fusion_advisor.lowering.rules.activation import ACTIVATIONS
from fusion_advisor.lowering.rules.creation import PLACES
from fusion_advisor.lowering.rules.random import RANDOM
from fusion_advisor.records import OpNode, Ref

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering


def _unary(name: str) -> Rule:
    def rule(lowering: Lowering, op: OpNode, where: Index) -> int:
        if argument_of(op, 1, "decimals", 0):
            raise CannotLower("FA601", f"{op.target} to decimals has no lowering")
        return lowering.make(name, lowering.argument(op, 0, where))

    return rule


_BOOLEAN = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}
"""What arithmetic means on two booleans."""


def _alpha(lowering: Lowering, op: OpNode, where: Index, number: int) -> int:
    alpha = op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("alpha", 1)
    return number if alpha == 1 else lowering.make("mul", number, lowering.element(alpha, where, op))


def _binary(name: str) -> Rule:
    def rule(lowering: Lowering, op: OpNode, where: Index) -> int:
        if dict(op.kwargs).get("rounding_mode") is not None:
            raise CannotLower("FA601", f"{op.target} with a rounding mode has no lowering")
        left, right = lowering.argument(op, 0, where), lowering.argument(op, 1, where)
        if op.outputs[0].dtype == "bool":
            return lowering.make(_BOOLEAN[name], left, right, dtype="bool")
        if name in ("add", "sub"):
            right = rounded_scalar(lowering, op, right)
        return lowering.make(name, left, _alpha(lowering, op, where, right))

    return rule


def _cut(lowering: Lowering, op: OpNode, position: int, number: int, dtype: str) -> int:
    """An argument as an integer of a dtype that may be narrower than its own."""
    source = op.args[position]
    return in_range(lowering, number, lowering.meta(source.index).dtype, dtype) if isinstance(source, Ref) else number


def _compare(name: str) -> Rule:
    def rule(lowering: Lowering, op: OpNode, where: Index) -> int:
        common = common_dtype(lowering, op)
        sides = [lowering.argument(op, position, where, dtype=compute_dtype(common)) for position in (0, 1)]
        # 0.1 is 0.10009765625 to a bfloat16 that it is compared with
        sides = [lowering.rounded(_cut(lowering, op, position, side, common), common) for position, side in enumerate(sides)]
        known = compared(lowering, name, *sides)
        return lowering.make(name, *sides, dtype="bool") if known is None else known

    return rule


def _logical(name: str) -> Rule:
    def rule(lowering: Lowering, op: OpNode, where: Index) -> int:
        if op.outputs[0].dtype != "bool":
            raise CannotLower("FA601", f"{op.target} on integers has no lowering")
        return lowering.make(
            name, *(lowering.argument(op, position, where, dtype="bool") for position in range(len(op.args))), dtype="bool"
        )

    return rule


def _to(lowering: Lowering, op: OpNode, where: Index) -> int:
    source = op.args[0]
    assert isinstance(source, Ref)
    if lowering.meta(source.index).device != op.outputs[0].device:
        raise CannotLower("FA601", f"{op.target} copies between devices")
    number, dtype = lowering.argument(op, 0, where), op.outputs[0].dtype
    if lowering.meta(source.index).dtype in FLOATS and dtype in ("int32", "int16", "int8"):
        return _through_int32(lowering, number, on_cpu=op.outputs[0].device.startswith("cpu"))
    return number


def _through_int32(lowering: Lowering, number: int, *, on_cpu: bool) -> int:
    """A float converted to int64, as if to int32: eager's narrower integers are cut from that one, but for uint8's, from int64.

    Where int32 cannot hold the number, x86 gives the lowest one. CUDA gives the nearest one, and for a NaN 0 out of a float32 and
    the lowest one out of a float64. The NaN is chosen by hand: LLVM makes one conversion of a conversion and two bounds, and that
    one gives 0.
    """
    low, high = lowering.const(-(2**31), "int64"), lowering.const(2**31 - 1, "int64")
    if on_cpu:
        fits = lowering.make(
            "and", lowering.make("ge", number, low, dtype="bool"), lowering.make("le", number, high, dtype="bool"), dtype="bool"
        )
        return lowering.make("where", fits, number, low, dtype="int64")
    nearest = lowering.make("minimum", lowering.make("maximum", number, low), high)
    source = lowering.values[number].args[0] if lowering.values[number].op == "cast" else number
    is_nan = lowering.make("isnan", source, dtype="bool")
    of_nan = lowering.const(0, "int64") if lowering.values[source].dtype == "float32" else low
    return lowering.make("where", is_nan, of_nan, nearest, dtype="int64")


def _remainder(lowering: Lowering, op: OpNode, where: Index) -> int:
    if compute_dtype(op.outputs[0].dtype) != "int64":
        raise CannotLower("FA601", f"{op.target} of floats is only exact with a long division that no kernel of ours does")
    if not (isinstance(op.args[1], int) and op.args[1] != 0):
        raise CannotLower("FA601", f"{op.target} by what may be 0 has no lowering: torch raises there")
    return _binary("remainder")(lowering, op, where)


def _rsub(lowering: Lowering, op: OpNode, where: Index) -> int:
    subtracted = _alpha(lowering, op, where, lowering.argument(op, 0, where))
    return lowering.make("sub", rounded_scalar(lowering, op, lowering.argument(op, 1, where)), subtracted)


def _pow(lowering: Lowering, op: OpNode, where: Index) -> int:
    base = lowering.argument(op, 0, where)
    exponent = lowering.argument(op, 1, where)
    constant = lowering.constant_of(exponent)
    if constant in (1, 2, 3, 4):
        result = base
        if constant == 4:
            squared = lowering.make("mul", base, base)
            return lowering.make("mul", squared, squared)
        for _ in range(int(constant) - 1):
            result = lowering.make("mul", result, base)
        return result
    if constant == 0.5:
        return lowering.make("sqrt", base)
    if constant == -0.5:
        return lowering.make("rsqrt", base)
    if constant == -1:
        return lowering.make("reciprocal", base)
    return lowering.make("pow", base, exponent)


def _clamp(lowering: Lowering, op: OpNode, where: Index) -> int:
    value = lowering.argument(op, 0, where)
    low, high = argument_of(op, 1, "min"), argument_of(op, 2, "max")
    if low is not None:
        value = lowering.make("maximum", value, lowering.element(low, where, op))
    return value if high is None else lowering.make("minimum", value, lowering.element(high, where, op))


def _where(lowering: Lowering, op: OpNode, where: Index) -> int:
    condition = lowering.argument(op, 0, where, dtype="bool")
    chosen, other = lowering.argument(op, 1, where), lowering.argument(op, 2, where)
    return lowering.make("where", condition, chosen, other, dtype=lowering.values[chosen].dtype)


def _masked_fill(lowering: Lowering, op: OpNode, where: Index) -> int:
    condition = lowering.argument(op, 1, where, dtype="bool")
    value, filled = lowering.argument(op, 0, where), lowering.argument(op, 2, where)
    return lowering.make("where", condition, filled, value, dtype=lowering.values[value].dtype)


def _addcmul(lowering: Lowering, op: OpNode, where: Index) -> int:
    scale = dict(op.kwargs).get("value", 1)
    left, right = lowering.argument(op, 1, where), lowering.argument(op, 2, where)
    if scale != 1:  # eager's order on a CPU: the product alone may overflow where a small scale keeps it finite
        left = lowering.make("mul", lowering.element(scale, where, op), left)
    return lowering.make("add", lowering.argument(op, 0, where), lowering.make("mul", left, right))


def _clamp_side(name: str) -> Rule:
    def rule(lowering: Lowering, op: OpNode, where: Index) -> int:
        return lowering.make(name, lowering.argument(op, 0, where), lowering.argument(op, 1, where))

    return rule


def _square(lowering: Lowering, op: OpNode, where: Index) -> int:
    value = lowering.argument(op, 0, where)
    return lowering.make("mul", value, value)


def _addcdiv(lowering: Lowering, op: OpNode, where: Index) -> int:
    scale = dict(op.kwargs).get("value", 1)
    above = lowering.argument(op, 1, where)
    if scale != 1:
        above = lowering.make("mul", above, lowering.element(scale, where, op))
    return lowering.make("add", lowering.argument(op, 0, where), lowering.make("div", above, lowering.argument(op, 2, where)))


def _lerp(lowering: Lowering, op: OpNode, where: Index) -> int:
    """Weights from a half on are counted from the end, as torch does it: both ends are then exact."""
    start, end, weight = (lowering.argument(op, position, where) for position in range(3))
    dtype = lowering.values[start].dtype
    step = lowering.make("sub", end, start)
    near = lowering.make("add", start, lowering.make("mul", weight, step))
    rest = lowering.make("sub", lowering.const(1.0, dtype), weight)
    far = lowering.make("sub", end, lowering.make("mul", step, rest))
    is_near = lowering.make("lt", lowering.make("abs", weight), lowering.const(0.5, dtype), dtype="bool")
    return lowering.make("where", is_near, near, far, dtype=dtype)


def _fraction(name: str) -> Rule:
    """``isnan`` and its relatives, which are false for every integer."""

    def rule(lowering: Lowering, op: OpNode, where: Index) -> int:
        source = op.args[0]
        assert isinstance(source, Ref)
        dtype = compute_dtype(lowering.meta(source.index).dtype)
        if not dtype.startswith("float"):
            return lowering.const(name == "isfinite", "bool")
        value = lowering.argument(op, 0, where, dtype=dtype)
        if name == "isnan":
            return lowering.make("isnan", value, dtype="bool")
        compared = "eq" if name == "isinf" else "lt"
        return lowering.make(compared, lowering.make("abs", value), lowering.const(math.inf, dtype), dtype="bool")

    return rule


POINTWISE: dict[str, Rule] = {
    **{name: _unary(name) for name in (
        "neg", "abs", "exp", "exp2", "log", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "erf",
        "erfc", "sin", "cos", "floor", "ceil", "trunc", "round", "sign",
    )},
    "add": _binary("add"), "sub": _binary("sub"), "mul": _binary("mul"), "div": _binary("div"), "true_divide": _binary("div"),
    "maximum": _binary("maximum"), "minimum": _binary("minimum"), "remainder": _remainder, "rsub": _rsub, "pow": _pow,
    **{name: _compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: _logical(op) for name, op in (
        ("__and__", "and"), ("__or__", "or"), ("__xor__", "xor"), ("logical_and", "and"), ("logical_or", "or"),
        ("logical_not", "not"), ("bitwise_and", "and"), ("bitwise_or", "or"), ("bitwise_not", "not"),
    )},
    "to": _to, "_to_copy": _to, "type_as": _to, "clamp": _clamp, "where": _where,
    "masked_fill": _masked_fill, "square": _square, "clamp_min": _clamp_side("maximum"), "clamp_max": _clamp_side("minimum"),
    "clip": _clamp, "addcdiv": _addcdiv, "lerp": _lerp, **{name: _fraction(name) for name in ("isnan", "isinf", "isfinite")},
    "logical_xor": _logical("xor"), "bitwise_xor": _logical("xor"), **ACTIVATIONS,
    "addcmul": _addcmul, **RANDOM, **PLACES,
}  # fmt: skip
