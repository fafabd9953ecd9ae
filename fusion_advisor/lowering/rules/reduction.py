"""Reductions, normalisations and ``cat``: ops that read other elements than their own."""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING

from fusion_advisor.chains.op_inputs import is_leading, reduced_dims, reduces_few
from fusion_advisor.ir.affine_index import Index, fixed, loop
from fusion_advisor.ir.dtypes import FLOATS, CannotLower, argument_of, compute_dtype
from fusion_advisor.ir.program import Value
from fusion_advisor.lowering.builder.builder import Rule
from fusion_advisor.lowering.builder.columns import column_index
from fusion_advisor.lowering.builder.rounding import narrows
from fusion_advisor.records import OpNode, Ref, TensorMeta

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering

_COMBINED = {"sum": "add", "max": "maximum", "min": "minimum"}
_EPSILON = {"float64": 2.220446049250313e-16, "float32": 1.1920928955078125e-07}
"""The epsilon of ``rms_norm`` where none is given: the one of the dtype that it computes in."""


def _reduction(kind: str, *, is_mean: bool = False) -> Rule:
    def rule(lowering: Lowering, op: OpNode, where: Index) -> int:
        source = op.args[0]
        assert isinstance(source, Ref)
        if op.outputs[0].dtype == "bool":
            raise CannotLower("FA601", f"{op.target} of booleans has no lowering")
        meta = lowering.meta(source.index)
        if meta.dtype in FLOATS and op.outputs[0].dtype not in FLOATS:  # torch rounds each element, then casts it as `to` does
            raise CannotLower("FA601", f"{op.target} of floats as {op.outputs[0].dtype} has no lowering")
        keepdim = bool(op.args[2]) if len(op.args) > 2 else bool(dict(op.kwargs).get("keepdim", False))
        dims = reduced_dims(argument_of(op, 1, "dim"), len(meta.shape))
        if reduces_few(op, lowering.ops):
            return _of_few(lowering, op, dims, where, kind, keepdim=keepdim, is_mean=is_mean)
        if is_leading(dims, len(meta.shape)):
            inner, variables = column_index(lowering, op, meta.shape, len(dims), where, keepdim=keepdim)
        else:
            inner, variables = lowering.reduction_index(op, meta, dims, where, keepdim=keepdim)
        number = lowering.row_element(source.index, inner, op, variables)
        result = lowering.reduce(kind, number, variables)
        if is_mean:
            result = lowering.make("div", result, lowering.emit(Value(op="size", dim=-1, dtype=lowering.values[result].dtype)))
        return result

    return rule


def _of_few(
    lowering: Lowering, op: OpNode, dims: tuple[int, ...], where: Index, kind: str, *, keepdim: bool, is_mean: bool
) -> int:
    """A few elements along dims in the midst, combined one by one: no loop runs over them."""
    source = op.args[0]
    assert isinstance(source, Ref)
    shape = lowering.meta(source.index).shape
    others = iter([place for dim, place in enumerate(where) if not keepdim or dim not in dims])
    kept = {dim: next(others) for dim in range(len(shape)) if dim not in dims}
    wanted, elements = op.outputs[0].dtype, []
    for turn in itertools.product(*(range(shape[dim]) for dim in dims)):
        here = kept | {dim: fixed(position) for dim, position in zip(dims, turn, strict=True)}
        element = lowering.cast(lowering.at(source.index, tuple(here[dim] for dim in range(len(shape)))), compute_dtype(wanted))
        elements.append(lowering.rounded(element, wanted) if narrows(lowering.ops, op) else element)
    result = functools.reduce(functools.partial(lowering.make, _COMBINED[kind]), elements)
    if is_mean:
        result = lowering.make("div", result, lowering.const(float(len(elements)), lowering.values[result].dtype))
    return result


def _norm_parts(lowering: Lowering, op: OpNode, where: Index) -> tuple[int, Index, frozenset[int]]:
    source, shape = op.args[0], op.args[1]
    assert isinstance(source, Ref) and isinstance(shape, tuple)
    meta = lowering.meta(source.index)
    dims = range(len(meta.shape) - len(shape), len(meta.shape))
    inner, variables = lowering.reduction_index(op, meta, tuple(dims), where, keepdim=True)
    return lowering.row_element(source.index, inner, op, variables), inner, variables


def _scaled(lowering: Lowering, op: OpNode, where: Index, number: int, *, weight: int, bias: int | None) -> int:
    shape = op.args[1]
    assert isinstance(shape, tuple)
    tail = where[len(where) - len(shape) :]
    if len(op.args) > weight and op.args[weight] is not None:
        number = lowering.make("mul", number, lowering.element(op.args[weight], tail, op))
    if bias is not None and len(op.args) > bias and op.args[bias] is not None:
        number = lowering.make("add", number, lowering.element(op.args[bias], tail, op))
    return number


def mean_of(lowering: Lowering, number: int, variables: frozenset[int]) -> int:
    """The mean of an element over the reduced loops."""
    total = lowering.reduce("sum", number, variables)
    return lowering.make("div", total, lowering.emit(Value(op="size", dim=-1, dtype=lowering.values[total].dtype)))


def _layer_norm_parts(lowering: Lowering, op: OpNode, where: Index) -> tuple[int, int, int]:
    """The element minus its row's mean, that mean, and one over the row's deviation."""
    value, inner, variables = _norm_parts(lowering, op, where)
    dtype = lowering.values[value].dtype
    mean = mean_of(lowering, value, variables)
    centred = lowering.make("sub", value, mean)
    variance = mean_of(lowering, lowering.make("mul", centred, centred), variables)
    if inner != where:  # read at another place than its own row element (rotated, say)
        centred = lowering.make("sub", lowering.argument(op, 0, where), mean)
    eps = op.args[4] if len(op.args) > 4 else 1e-5
    return centred, mean, lowering.make("rsqrt", lowering.make("add", variance, lowering.element(eps, where, op, dtype)))


def _layer_norm(lowering: Lowering, op: OpNode, where: Index) -> int:
    centred, _, scale = _layer_norm_parts(lowering, op, where)
    return _scaled(lowering, op, where, lowering.make("mul", centred, scale), weight=2, bias=3)


def native_layer_norm(lowering: Lowering, op: OpNode, result: int, where: Index) -> int:
    """The norm, its rows' means, or one over their deviations, which the backward pass reads."""
    return _layer_norm(lowering, op, where) if result == 0 else _layer_norm_parts(lowering, op, where)[result]


def _rms_norm(lowering: Lowering, op: OpNode, where: Index) -> int:
    value, inner, variables = _norm_parts(lowering, op, where)
    element = value if inner == where else lowering.argument(op, 0, where)
    eps = op.args[3] if len(op.args) > 3 else None
    eps = _EPSILON[lowering.values[value].dtype] if eps is None else eps
    mean = mean_of(lowering, lowering.make("mul", value, value), variables)
    scale = lowering.make("rsqrt", lowering.make("add", mean, lowering.element(eps, where, op, lowering.values[value].dtype)))
    return _scaled(lowering, op, where, lowering.make("mul", element, scale), weight=2, bias=None)


def _softmax(lowering: Lowering, op: OpNode, where: Index) -> int:
    source, dim = op.args[0], op.args[1]
    assert isinstance(source, Ref) and isinstance(dim, int)
    meta = lowering.meta(source.index)
    inner, variables = lowering.reduction_index(op, meta, (dim,), where, keepdim=True)
    value = lowering.row_element(source.index, inner, op, variables)
    highest = lowering.reduce("max", value, variables)
    shifted = lowering.make("sub", value, highest)
    exponential = lowering.make("exp", shifted)
    total = lowering.reduce("sum", exponential, variables)
    if inner != where:
        shifted = lowering.make("sub", lowering.argument(op, 0, where), highest)
        exponential = lowering.make("exp", shifted)
    if "log_softmax" in op.target:
        return lowering.make("sub", shifted, lowering.make("log", total))
    result = lowering.make("div", exponential, total)
    if "safe_softmax" not in op.target:
        return result
    # Attention's formula: a query from which its mask hides every key gets zeros, where softmax gives no number.
    dtype = lowering.values[result].dtype
    is_hidden = lowering.make("eq", highest, lowering.const(-math.inf, lowering.values[highest].dtype), dtype="bool")
    return lowering.make("where", is_hidden, lowering.const(0.0, dtype), result, dtype=dtype)


def _cat(lowering: Lowering, op: OpNode, where: Index) -> int:
    """A cat is a choice by index: piece k where the index lies in its range, each load guarded by that range.

    Where all pieces have one shape and a loop runs over all of them, the loop is cut and written out: every piece is then known.
    """
    assert isinstance(op.args[0], tuple)
    rank = len(op.outputs[0].shape)
    # An empty key/value cache is a 1-d tensor without elements, which torch lets through and leaves out.
    pieces = [piece for piece in op.args[0] if isinstance(piece, Ref) and lowering.meta(piece.index).shape != (0,)]
    dim = int(op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("dim", 0)) % rank  # type: ignore[arg-type]
    sizes = [lowering.meta(piece.index).shape[dim] for piece in pieces]
    return _piece_at(lowering, op, [piece.index for piece in pieces], sizes, dim, where)


def _stack(lowering: Lowering, op: OpNode, where: Index) -> int:
    """A stack is a cat of pieces of size 1, without that dim."""
    assert isinstance(op.args[0], tuple)
    rank = len(op.outputs[0].shape)
    pieces = [piece.index for piece in op.args[0] if isinstance(piece, Ref)]
    dim = int(op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("dim", 0)) % rank  # type: ignore[arg-type]
    return _piece_at(lowering, op, pieces, [1] * len(pieces), dim, where, is_stack=True)


_MOST_PIECES = 4


def _piece_at(
    lowering: Lowering, op: OpNode, pieces: list[int], sizes: list[int], dim: int, where: Index, *, is_stack: bool = False
) -> int:
    place, dtype = where[dim], compute_dtype(op.outputs[0].dtype)

    def element(number: int, guard: int | None) -> int:
        start = sum(sizes[:number])
        moved = () if is_stack else (place.moved(-start),)
        inner = (*where[:dim], *moved, *where[dim + 1 :])
        if guard is None:
            return lowering.cast(lowering.at(pieces[number], inner), dtype)
        return lowering.guarded(pieces[number], inner, guard, dtype)

    lowest, highest = lowering.range_of(place)
    inside = [n for n in range(len(pieces)) if sum(sizes[:n]) <= highest and sum(sizes[: n + 1]) > lowest]
    if not inside:
        raise CannotLower("FA603", "a cat of pieces that are all empty has no element")
    if len(inside) == 1:
        return element(inside[0], None)
    if place.gathered or len(inside) > _MOST_PIECES:
        raise CannotLower("FA603", f"a cat of {len(pieces)} pieces along a dim that is not iterated has no lowering")
    turn = lowering.piece_loop(place, sizes[0], len(pieces)) if len(set(sizes)) == 1 else None
    here = lowering.place_value(place if turn is None else loop(turn))
    unit = 1 if turn is None else sizes[0]
    result = None
    for number in reversed(inside):
        start, end = sum(sizes[:number]) // unit, sum(sizes[: number + 1]) // unit
        after = None if number == inside[0] else lowering.make("ge", here, lowering.const(start, "int64"), dtype="bool")
        if result is None:
            result = element(number, after)
            continue
        before = lowering.make("lt", here, lowering.const(end, "int64"), dtype="bool")
        guard = before if after is None else lowering.make("and", before, after, dtype="bool")
        result = lowering.make("where", before, element(number, guard), result, dtype=dtype)
    assert result is not None
    return result


def _variance(lowering: Lowering, op: OpNode, where: Index) -> int:
    """``var`` and ``std``, whose overloads spell the correction in two ways."""
    source = op.args[0]
    assert isinstance(source, Ref)
    overload = op.target.rpartition(".")[2]
    named = dict(op.kwargs)
    if overload == "correction":
        correction, keepdim = named.get("correction", 1), named.get("keepdim", False)
        dims = argument_of(op, 1, "dim")
    elif overload == "dim":
        correction, keepdim = int(bool(argument_of(op, 2, "unbiased", True))), argument_of(op, 3, "keepdim", False)
        dims = argument_of(op, 1, "dim")
    else:
        raise CannotLower("FA601", f"{op.target} has no lowering")
    correction = 1 if correction is None else correction
    assert isinstance(correction, int | float)
    meta = lowering.meta(source.index)
    wanted = reduced_dims(dims, len(meta.shape))
    inner, variables = lowering.reduction_index(op, meta, wanted, where, keepdim=bool(keepdim))
    value = _widened(lowering, lowering.row_element(source.index, inner, op, variables), meta)
    dtype = lowering.values[value].dtype
    centred = lowering.make("sub", value, mean_of(lowering, value, variables))
    total = lowering.reduce("sum", lowering.make("mul", centred, centred), variables)
    count = lowering.emit(Value(op="size", dim=-1, dtype=dtype))
    if correction:
        left = lowering.make("sub", count, lowering.const(float(correction), dtype))
        count = lowering.make("maximum", left, lowering.const(0.0, dtype))
    variance = lowering.make("div", total, count)
    variance = lowering.make("sqrt", variance) if op.target.startswith("aten.std") else variance
    return lowering.cast(variance, compute_dtype(op.outputs[0].dtype))


def _widened(lowering: Lowering, number: int, source: TensorMeta) -> int:
    """An element whose square is summed: on the CPU in fp64, as eager does, where fp32 overflows from 1e19 on.

    CUDA's eager sums squares in fp32 too, and overflows there.
    """
    return lowering.cast(number, "float64") if source.device.startswith("cpu") else number


def _vector_norm(lowering: Lowering, op: OpNode, where: Index) -> int:
    source = op.args[0]
    assert isinstance(source, Ref)
    order = argument_of(op, 1, "ord", argument_of(op, 1, "p", 2))
    meta = lowering.meta(source.index)
    dims = reduced_dims(argument_of(op, 2, "dim"), len(meta.shape))
    inner, variables = lowering.reduction_index(op, meta, dims, where, keepdim=bool(argument_of(op, 3, "keepdim", False)))
    value = lowering.row_element(source.index, inner, op, variables)
    if order == 2:
        value = _widened(lowering, value, meta)
        norm = lowering.make("sqrt", lowering.reduce("sum", lowering.make("mul", value, value), variables))
        return lowering.cast(norm, compute_dtype(op.outputs[0].dtype))
    if order in (1, math.inf):
        return lowering.reduce("sum" if order == 1 else "max", lowering.make("abs", value), variables)
    raise CannotLower("FA601", f"{op.target} of order {order} has no lowering")


def _weight_norm(lowering: Lowering, op: OpNode, where: Index) -> int:
    """``v * (g / |v|)``, the length taken over all dims but one; -1: over all."""
    source, dim = op.args[0], argument_of(op, 2, "dim", 0)
    assert isinstance(source, Ref) and isinstance(dim, int)
    meta = lowering.meta(source.index)
    rank = len(meta.shape)
    others = tuple(axis for axis in range(rank) if axis != dim)
    inner, variables = lowering.reduction_index(op, meta, others, where, keepdim=True)
    value = _widened(lowering, lowering.row_element(source.index, inner, op, variables), meta)
    length = lowering.make("sqrt", lowering.reduce("sum", lowering.make("mul", value, value), variables))
    scale = lowering.make("div", lowering.argument(op, 1, where), lowering.cast(length, compute_dtype(op.outputs[0].dtype)))
    return lowering.make("mul", lowering.argument(op, 0, where), scale)


def _logsumexp(lowering: Lowering, op: OpNode, where: Index) -> int:
    source = op.args[0]
    assert isinstance(source, Ref)
    meta = lowering.meta(source.index)
    keepdim = bool(argument_of(op, 2, "keepdim", False))
    inner, variables = lowering.reduction_index(op, meta, reduced_dims(op.args[1], len(meta.shape)), where, keepdim=keepdim)
    value = lowering.row_element(source.index, inner, op, variables)
    dtype = lowering.values[value].dtype
    highest = lowering.reduce("max", value, variables)
    # inf − inf is not a number: a row whose largest element is infinite is shifted by nothing.
    is_infinite = lowering.make("eq", lowering.make("abs", highest), lowering.const(math.inf, dtype), dtype="bool")
    shift = lowering.make("where", is_infinite, lowering.const(0.0, dtype), highest, dtype=dtype)
    total = lowering.reduce("sum", lowering.make("exp", lowering.make("sub", value, shift)), variables)
    return lowering.make("add", lowering.make("log", total), shift)


def _batch_norm(lowering: Lowering, op: OpNode, where: Index) -> int:
    """In eval mode it reduces nothing: every channel has its own four numbers."""
    if op.args[5]:
        raise CannotLower("FA601", "batch_norm in training mode writes its running statistics")
    weight, bias, mean, variance = (
        None if tensor is None else lowering.element(tensor, (where[1],), op) for tensor in op.args[1:5]
    )
    value = lowering.argument(op, 0, where)
    assert mean is not None and variance is not None
    shifted = lowering.make("add", variance, lowering.element(op.args[7], where, op))
    value = lowering.make("mul", lowering.make("sub", value, mean), lowering.make("rsqrt", shifted))
    value = value if weight is None else lowering.make("mul", value, weight)
    return value if bias is None else lowering.make("add", value, bias)


def _larger(name: str) -> Rule:
    """``max`` and ``min`` of two tensors; of one they return two values, or a single number."""

    def rule(lowering: Lowering, op: OpNode, where: Index) -> int:
        if not op.target.endswith(".other") or op.outputs[0].dtype == "bool":
            raise CannotLower("FA601", f"{op.target} has no lowering")
        return lowering.make(name, lowering.argument(op, 0, where), lowering.argument(op, 1, where))

    return rule


def _refused(sentence: str) -> Rule:
    def rule(_lowering: Lowering, op: OpNode, _where: Index) -> int:
        raise CannotLower("FA601", f"{op.target} {sentence}")

    return rule


SPECIAL: dict[str, Rule] = {
    "mean": _reduction("sum", is_mean=True), "sum": _reduction("sum"), "amax": _reduction("max"), "amin": _reduction("min"),
    "layer_norm": _layer_norm, "rms_norm": _rms_norm, "softmax": _softmax, "_softmax": _softmax, "log_softmax": _softmax,
    "_log_softmax": _softmax, "_safe_softmax": _softmax, "cat": _cat, "stack": _stack, "var": _variance, "std": _variance,
    "norm": _vector_norm, "logsumexp": _logsumexp,
    "linalg_vector_norm": _vector_norm, "_weight_norm": _weight_norm, "batch_norm": _batch_norm,
    "max": _larger("maximum"), "min": _larger("minimum"),
    "cumsum": _refused("needs the elements before its own"),
    "adaptive_avg_pool2d": _refused("reduces over windows of several sizes"),
    **dict.fromkeys(("argmax", "argmin"), _refused("returns places, not values")),
}  # fmt: skip
