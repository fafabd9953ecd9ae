"""Backward passes of activations, dropout and softmax: ATen's own ops of a backward graph, in the IR's arithmetic.

Each formula is the derivative that torch's kernels compute, with their choice at the kinks (``aten/src/ATen/native``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fusion_advisor.ir.affine_index import ORIGIN, Index
from fusion_advisor.ir.dtypes import CannotLower, argument_of, compute_dtype
from fusion_advisor.ir.program import HALF
from fusion_advisor.lowering.builder.builder import Rule
from fusion_advisor.records import OpNode, Ref

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering


class _Maths:
    """A derivative's arithmetic; floats become constants of the gradient's dtype."""

    def __init__(self, lowering: Lowering, op: OpNode, where: Index) -> None:
        _refuse_mixed(lowering, op)
        self.lowering, self.op, self.where = lowering, op, where
        self.gradient = lowering.argument(op, 0, where)
        self.dtype = lowering.values[self.gradient].dtype
        self.is_on_cpu = op.outputs[0].device == "cpu"

    def operand(self, position: int) -> int:
        """The element of another tensor argument."""
        return self.lowering.argument(self.op, position, self.where, dtype=self.dtype)

    def number(self, position: int, name: str, default: float) -> float:
        """A number among the arguments."""
        found = argument_of(self.op, position, name, default)
        if not isinstance(found, int | float):
            raise CannotLower("FA601", f"{self.op.target} has an argument {found!r} that no kernel takes")
        return float(found)

    def __call__(self, name: str, *args: int | float) -> int:
        """Append an op."""
        numbers = [self.lowering.const(arg, self.dtype) if isinstance(arg, float) else arg for arg in args]
        is_compare = name in ("gt", "lt", "ge", "le", "or", "and")
        return self.lowering.make(name, *numbers, dtype="bool" if is_compare else self.dtype)

    def one_minus(self, value: int) -> int:
        """1 − value."""
        return self("sub", 1.0, value)


def _refuse_mixed(lowering: Lowering, op: OpNode) -> None:
    """Refuse tensors of different dtypes: autograd passes none, and what torch makes of them differs from op to op.

    Raises:
        CannotLower: the result is no float, or an operand has another dtype; a mask of booleans may.
    """
    wanted = op.outputs[0].dtype
    found = [lowering.meta(one.index).dtype for one in op.args if isinstance(one, Ref)]
    if not wanted.startswith(("float", "bfloat")) or found[0] != wanted or set(found) - {wanted, "bool"}:
        raise CannotLower("FA601", f"{op.target} of {', '.join(found)} has no lowering")


def _of_tanh(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths = _Maths(lowering, op, where)
    result = maths.operand(1)
    return maths("mul", maths.gradient, maths.one_minus(maths("mul", result, result)))


def _of_sigmoid(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths = _Maths(lowering, op, where)
    result = maths.operand(1)
    return maths("mul", maths("mul", maths.gradient, maths.one_minus(result)), result)


def _of_silu(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths = _Maths(lowering, op, where)
    value = maths.operand(1)
    gate = maths("sigmoid", value)
    slope = maths("add", 1.0, maths("mul", value, maths.one_minus(gate)))
    return maths("mul", maths("mul", maths.gradient, gate), slope)


def _of_gelu(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths = _Maths(lowering, op, where)
    value = maths.operand(1)
    square = maths("mul", value, value)
    if dict(op.kwargs).get("approximate", "none") == "tanh":
        root, cubic = math.sqrt(8 / math.pi), 0.044715
        twice = maths("mul", root, maths("add", value, maths("mul", cubic, maths("mul", square, value))))
        inner_slope = maths("mul", root, maths("add", 1.0, maths("mul", 3 * cubic, square)))
        if op.outputs[0].dtype in HALF:
            # The sigmoid s of 2u is (1 + tanh u) / 2, and s (1 - s) is (1 - tanh² u) / 4: one function serves both.
            below = maths("sigmoid", twice)
            bend = maths("mul", below, maths.one_minus(below))
        else:  # 1 - s would have twice the error of 1 - tanh²; and 0.5 (1 + tanh) would be made a sigmoid beside it
            curve = maths("tanh", maths("mul", 0.5, twice))
            below = maths("add", 0.5, maths("mul", 0.5, curve))
            bend = maths("mul", 0.25, maths.one_minus(maths("mul", curve, curve)))
        slope = maths("add", below, maths("mul", value, maths("mul", bend, inner_slope)))
    else:
        below = maths("mul", 0.5, maths("add", 1.0, maths("erf", maths("mul", value, math.sqrt(0.5)))))
        density = maths("mul", maths("exp", maths("mul", square, -0.5)), 1 / math.sqrt(2 * math.pi))
        slope = maths("add", below, maths("mul", value, density))
    return maths("mul", maths.gradient, slope)


def _of_threshold(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths = _Maths(lowering, op, where)
    return maths("where", maths("le", maths.operand(1), maths.number(2, "threshold", 0.0)), 0.0, maths.gradient)


def _of_leaky_relu(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths = _Maths(lowering, op, where)
    below = maths("mul", maths.gradient, maths.number(2, "negative_slope", 0.01))
    return maths("where", maths("gt", maths.operand(1), 0.0), maths.gradient, below)


def _of_hardtanh(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths = _Maths(lowering, op, where)
    value = maths.operand(1)
    low, high = maths.number(2, "min_val", -1.0), maths.number(3, "max_val", 1.0)
    if maths.is_on_cpu:  # at NaN its vectors have no gradient; a GPU and the elements that fill no vector hand it on
        return maths("where", maths("and", maths("gt", value, low), maths("lt", value, high)), maths.gradient, 0.0)
    return maths("where", maths("or", maths("le", value, low), maths("ge", value, high)), 0.0, maths.gradient)


def _of_hardsigmoid(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths = _Maths(lowering, op, where)
    value = maths.operand(1)
    inside = maths("and", maths("gt", value, -3.0), maths("lt", value, 3.0))
    return maths("where", inside, maths("mul", maths.gradient, 1 / 6), 0.0)


def _of_elu(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths = _Maths(lowering, op, where)
    alpha, scale, input_scale = (maths.number(n, "", 1.0) for n in (1, 2, 3))
    value = maths.operand(5)
    if op.args[4]:
        below = maths("mul", input_scale, maths("add", value, alpha * scale))
    else:
        below = maths("mul", input_scale * alpha * scale, maths("exp", maths("mul", value, input_scale)))
    above, below = maths("mul", maths.gradient, scale), maths("mul", maths.gradient, below)
    if maths.is_on_cpu:  # at NaN its vectors have NaN; a GPU and the elements that fill no vector hand the gradient on
        return maths("where", maths("gt", value, 0.0), above, below)
    return maths("where", maths("le", value, 0.0), below, above)


def _of_softplus(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths = _Maths(lowering, op, where)
    scaled = maths("mul", maths.operand(1), maths.number(2, "beta", 1.0))
    power = maths("exp", scaled)
    bent = maths("div", maths("mul", maths.gradient, power), maths("add", power, 1.0))
    return maths("where", maths("gt", scaled, maths.number(3, "threshold", 20.0)), maths.gradient, bent)


def _of_dropout(lowering: Lowering, op: OpNode, where: Index) -> int:
    maths = _Maths(lowering, op, where)
    return maths("mul", maths.gradient, maths("mul", maths.operand(1), maths.number(2, "scale", 1.0)))


def _of_softmax(lowering: Lowering, op: OpNode, where: Index) -> int:
    """With y the result of softmax: y (g − Σ g y); of log_softmax: g − exp(y) Σ g."""
    source, other, dim = op.args[0], op.args[1], op.args[2]
    assert isinstance(source, Ref) and isinstance(other, Ref) and isinstance(dim, int)
    meta = lowering.meta(source.index)
    _refuse_mixed(lowering, op)
    if not meta.shape or lowering.meta(other.index).shape != meta.shape:
        raise CannotLower("FA601", f"{op.target} of other shapes than its result's has no lowering")
    inner, variables = lowering.reduction_index(op, meta, (dim,), where, keepdim=True)
    gradient = lowering.row_element(source.index, inner, op, variables)
    result = lowering.row_element(other.index, inner, op, variables)
    here = (gradient, result) if inner == where else (lowering.argument(op, 0, where), lowering.argument(op, 1, where))
    if "log_softmax" in op.target:
        total = lowering.reduce("sum", gradient, variables)
        return lowering.make("sub", here[0], lowering.make("mul", lowering.make("exp", here[1]), total))
    total = lowering.reduce("sum", lowering.make("mul", gradient, result), variables)
    return lowering.make("mul", here[1], lowering.make("sub", here[0], total))


def _of_nll_loss(lowering: Lowering, op: OpNode, where: Index) -> int:
    """-gradient at each row's target, over the rows that count where the loss is their mean; 0 elsewhere.

    A target out of range has no column, so nothing is read or written for it. The forward pass has stopped at it already.
    """
    gradient, source, target, total = op.args[0], op.args[1], op.args[2], op.args[6]
    reduction, ignored = op.args[4], op.args[5]
    assert isinstance(gradient, Ref) and isinstance(source, Ref) and isinstance(target, Ref) and isinstance(total, Ref)
    shape, dtype = lowering.meta(source.index).shape, op.outputs[0].dtype
    if op.args[3] is not None:
        raise CannotLower("FA601", f"{op.target} with a weight for each class has no lowering")
    if len(shape) != 2 or lowering.meta(target.index).dtype != "int64" or lowering.meta(gradient.index).dtype != dtype:
        raise CannotLower("FA601", f"{op.target} of a shape {shape} has no lowering: it takes rows of classes and their targets")
    assert isinstance(ignored, int)
    row = where[:1] if shape[0] != 1 else (ORIGIN,)
    own = lowering.at(target.index, row)
    is_column = lowering.make("eq", lowering.place_value(where[1]), own, dtype="bool")
    counts = lowering.make("ne", own, lowering.const(ignored, "int64"), dtype="bool")
    compute = compute_dtype(dtype)
    loss = lowering.at(gradient.index, row) if reduction == 0 else lowering.the_number(gradient.index, compute)
    if reduction == 1:
        loss = lowering.make("div", loss, lowering.the_number(total.index, compute))
    is_target = lowering.make("and", is_column, counts, dtype="bool")
    return lowering.make("where", is_target, lowering.make("neg", loss), lowering.const(0.0, compute), dtype=compute)


BACKWARD: dict[str, Rule] = {
    "tanh_backward": _of_tanh, "sigmoid_backward": _of_sigmoid, "silu_backward": _of_silu, "gelu_backward": _of_gelu,
    "threshold_backward": _of_threshold, "leaky_relu_backward": _of_leaky_relu, "hardtanh_backward": _of_hardtanh,
    "hardsigmoid_backward": _of_hardsigmoid, "elu_backward": _of_elu, "softplus_backward": _of_softplus,
    "native_dropout_backward": _of_dropout,
}  # fmt: skip
"""Of ops that compute element by element."""
ROWS_BACKWARD: dict[str, Rule] = {
    "_softmax_backward_data": _of_softmax, "_log_softmax_backward_data": _of_softmax, "nll_loss_backward": _of_nll_loss,
}  # fmt: skip
