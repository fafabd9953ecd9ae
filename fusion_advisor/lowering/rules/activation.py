"""Activation functions, written out in the IR's own arithmetic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fusion_advisor.ir.affine_index import ORIGIN, Index
from fusion_advisor.ir.dtypes import CannotLower, argument_of
from fusion_advisor.lowering.builder.builder import Rule
from fusion_advisor.lowering.rules.view import shifted
from fusion_advisor.records import Arg, OpNode, Ref

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering


def _silu(lowering: Lowering, op: OpNode, where: Index) -> int:
    value = lowering.argument(op, 0, where)
    return lowering.make("mul", value, lowering.make("sigmoid", value))


def _gelu(lowering: Lowering, op: OpNode, where: Index) -> int:
    value = lowering.argument(op, 0, where)
    dtype = lowering.values[value].dtype

    def const(number: float) -> int:
        return lowering.const(number, dtype)

    if dict(op.kwargs).get("approximate", "none") == "tanh":
        cube = lowering.make("mul", lowering.make("mul", value, value), value)
        inner = lowering.make("add", value, lowering.make("mul", cube, const(0.044715)))
        inner = lowering.make("mul", inner, const(math.sqrt(2 / math.pi)))
        return lowering.make(
            "mul", lowering.make("mul", value, const(0.5)), lowering.make("add", lowering.make("tanh", inner), const(1.0))
        )
    erf = lowering.make("erf", lowering.make("mul", value, const(math.sqrt(0.5))))
    return lowering.make("mul", lowering.make("mul", value, const(0.5)), lowering.make("add", erf, const(1.0)))


def _relu(lowering: Lowering, op: OpNode, where: Index) -> int:
    value = lowering.argument(op, 0, where)
    return lowering.make("maximum", value, lowering.const(0, lowering.values[value].dtype))


def _leaky_relu(lowering: Lowering, op: OpNode, where: Index) -> int:
    value = lowering.argument(op, 0, where)
    dtype = lowering.values[value].dtype
    slope = argument_of(op, 1, "negative_slope", 0.01)
    positive = lowering.make("gt", value, lowering.const(0, dtype), dtype="bool")
    return lowering.make("where", positive, value, lowering.make("mul", value, lowering.element(slope, where, op)), dtype=dtype)


class _Maths:
    """One activation's arithmetic: numbers become constants of the value's dtype."""

    def __init__(self, lowering: Lowering, op: OpNode, where: Index) -> None:
        self.lowering = lowering
        self.value = lowering.argument(op, 0, where)
        self.dtype = lowering.values[self.value].dtype

    def __call__(self, name: str, *args: int | float) -> int:
        """Append an op; an int is a value's number, a float a constant."""
        numbers = [self.lowering.const(arg, self.dtype) if isinstance(arg, float) else arg for arg in args]
        compared = name in ("gt", "lt", "ge", "le")
        return self.lowering.make(name, *numbers, dtype="bool" if compared else self.dtype)


def _number(op: OpNode, position: int, name: str, default: float) -> float:
    found: Arg = argument_of(op, position, name, default)
    if not isinstance(found, int | float):
        raise CannotLower("FA601", f"{op.target} has an argument {found!r} that no kernel takes")
    return float(found)


def _softplus(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths = _Maths(lowering, op, where)
    return _softplus_of(maths, maths.value, _number(op, 1, "beta", 1.0), _number(op, 2, "threshold", 20.0))


def _softplus_of(maths: _Maths, value: int, beta: float, threshold: float) -> int:
    scaled = maths("mul", value, beta)
    bent = maths("div", maths("log1p", maths("exp", scaled)), beta)
    return maths("where", maths("gt", scaled, threshold), value, bent)


def _mish(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths = _Maths(lowering, op, where)
    return maths("mul", maths.value, maths("tanh", _softplus_of(maths, maths.value, 1.0, 20.0)))


def _log_sigmoid(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths = _Maths(lowering, op, where)
    tail = maths("log1p", maths("exp", maths("neg", maths("abs", maths.value))))
    return maths("sub", maths("minimum", maths.value, 0.0), tail)


def _exponential_linear(maths: _Maths, alpha: float, scale: float, input_scale: float) -> int:
    below = maths("mul", maths("expm1", maths("mul", maths.value, input_scale)), alpha * scale)
    return maths("where", maths("gt", maths.value, 0.0), maths("mul", maths.value, scale), below)


def _elu(lowering: Lowering, op: OpNode, where: Index) -> int:
    numbers = (_number(op, 1, "alpha", 1.0), _number(op, 2, "scale", 1.0), _number(op, 3, "input_scale", 1.0))
    return _exponential_linear(_Maths(lowering, op, where), *numbers)


def _selu(lowering: Lowering, op: OpNode, where: Index) -> int:
    return _exponential_linear(_Maths(lowering, op, where), 1.6732632423543772, 1.0507009873554805, 1.0)


def _celu(lowering: Lowering, op: OpNode, where: Index) -> int:
    alpha = _number(op, 1, "alpha", 1.0)
    return _exponential_linear(_Maths(lowering, op, where), alpha, 1.0, 1.0 / alpha)


def _hardtanh(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths = _Maths(lowering, op, where)
    low, high = (0.0, 6.0) if op.target.startswith("aten.relu6") else (_number(op, 1, "min_val", -1.0), 0.0)
    if not op.target.startswith("aten.relu6"):
        high = _number(op, 2, "max_val", 1.0)
    return maths("minimum", maths("maximum", maths.value, low), high)


def _hardsigmoid(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths = _Maths(lowering, op, where)
    gate = maths("div", maths("minimum", maths("maximum", maths("add", maths.value, 3.0), 0.0), 6.0), 6.0)
    return maths("mul", maths.value, gate) if "hardswish" in op.target else gate


def _threshold(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths = _Maths(lowering, op, where)
    return maths("where", maths("le", maths.value, _number(op, 1, "threshold", 0.0)), _number(op, 2, "value", 0.0), maths.value)


def _prelu(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths, weight = _Maths(lowering, op, where), op.args[1]
    assert isinstance(weight, Ref)
    shape = lowering.meta(weight.index).shape
    place: Index = () if shape == () else (ORIGIN,) if shape == (1,) else (where[1],)
    slope = lowering.cast(lowering.at(weight.index, place), maths.dtype)
    return maths("where", maths("gt", maths.value, 0.0), maths.value, maths("mul", maths.value, slope))


def _glu(lowering: Lowering, op: OpNode, where: Index) -> int:
    source = op.args[0]
    assert isinstance(source, Ref)
    dim = int(_number(op, 1, "dim", -1)) % len(where)
    maths_dtype = lowering.values[value := lowering.at(source.index, where)].dtype
    gate = lowering.cast(lowering.at(source.index, shifted(where, dim, op.outputs[0].shape[dim])), maths_dtype)
    return lowering.make("mul", value, lowering.make("sigmoid", gate))


ACTIVATIONS: dict[str, Rule] = {
    "silu": _silu, "gelu": _gelu, "relu": _relu, "leaky_relu": _leaky_relu, "softplus": _softplus, "mish": _mish, "elu": _elu,
    "log_sigmoid": _log_sigmoid, "selu": _selu, "celu": _celu, "hardtanh": _hardtanh, "relu6": _hardtanh, "glu": _glu,
    "hardsigmoid": _hardsigmoid, "hardswish": _hardsigmoid, "threshold": _threshold, "prelu": _prelu,
}  # fmt: skip
