"""Gradients of layer norm: of its input row by row, of its weight and bias column by column.

``native_layer_norm_backward`` returns all three. ``fuse.train.passes.gradient_parts`` makes two calls of it, so that a chain
holds gradients that are reduced over the same dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fusion_advisor.ir.affine_index import ORIGIN, Index
from fusion_advisor.ir.dtypes import CannotLower
from fusion_advisor.lowering.builder.columns import column_index
from fusion_advisor.lowering.rules.reduction import mean_of, native_layer_norm
from fusion_advisor.records import OpNode, Ref

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering

ResultRule = Callable[["Lowering", OpNode, int, Index], int]
"""Returns the number of the value that is the wanted element of one of an op's results."""


def _layer_norm_backward(lowering: Lowering, op: OpNode, result: int, where: Index) -> int:
    """With x̂ = (x - mean) / deviation: of the input (g - mean(g) - x̂ mean(g x̂)) / deviation, where g = gradient × weight.

    Of the weight Σ gradient × x̂ over the rows, of the bias Σ gradient.
    """
    source, shape, mask = op.args[0], op.args[2], op.args[7]
    assert isinstance(source, Ref) and isinstance(shape, tuple) and isinstance(mask, tuple)
    if mask[result] is not True:
        raise CannotLower("FA601", f"{op.target} is not asked for result {result}")
    meta = lowering.meta(source.index)
    rows = len(meta.shape) - len(shape)
    if any(lowering.meta(arg.index).dtype != meta.dtype for arg in (op.args[1], op.args[5]) if isinstance(arg, Ref)):
        raise CannotLower("FA601", f"{op.target} of mixed dtypes has no lowering")
    if result == 0:
        return _of_input(lowering, op, where, rows)
    inner, variables = column_index(lowering, op, meta.shape, rows, where, keepdim=False)
    value = lowering.row_element(source.index, inner, op, variables)
    if result == 1:
        value = lowering.make("mul", value, _normalized(lowering, op, inner, rows, variables)[0])
    return lowering.reduce("sum", value, variables)


def _normalized(
    lowering: Lowering, op: OpNode, inner: Index, rows: int, variables: frozenset[int]
) -> tuple[int, int]:  # fmt: skip
    """An element of the normalized input, and one over its row's deviation."""
    value, mean, scale = op.args[1], op.args[3], op.args[4]
    assert isinstance(value, Ref) and isinstance(mean, Ref) and isinstance(scale, Ref)
    row = (*inner[:rows], *(ORIGIN,) * (len(inner) - rows))
    numbers = [lowering.row_element(arg.index, row, op, variables) for arg in (mean, scale)]
    element = lowering.row_element(value.index, inner, op, variables)
    return lowering.make("mul", lowering.make("sub", element, numbers[0]), numbers[1]), numbers[1]


def _of_input(lowering: Lowering, op: OpNode, where: Index, rows: int) -> int:
    source = op.args[0]
    assert isinstance(source, Ref)
    meta = lowering.meta(source.index)
    inner, variables = lowering.reduction_index(op, meta, tuple(range(rows, len(meta.shape))), where, keepdim=True)

    def parts(index: Index) -> tuple[int, int, int]:
        gradient = lowering.row_element(source.index, index, op, variables)
        if op.args[5] is not None:
            gradient = lowering.make("mul", gradient, lowering.element(op.args[5], index[rows:], op))
        return gradient, *_normalized(lowering, op, index, rows, variables)

    gradient, normalized, scale = parts(inner)
    first = mean_of(lowering, gradient, variables)
    second = mean_of(lowering, lowering.make("mul", gradient, normalized), variables)
    if inner != where:  # read at another place than its own row element
        gradient, normalized, scale = parts(where)
    centred = lowering.make("sub", lowering.make("sub", gradient, first), lowering.make("mul", normalized, second))
    return lowering.make("mul", centred, scale)


RESULTS: dict[str, ResultRule] = {
    "native_layer_norm": native_layer_norm, "native_layer_norm_backward": _layer_norm_backward,
}  # fmt: skip
"""Of ops that return several tensors."""
