"""Reductions, normalisations and ``cat``: ops that read other elements than their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion_advisor.library.program import Value
from fusion_advisor.library.rule import CannotLower, Index, Rule, compute_dtype
from fusion_advisor.records import OpNode, Ref, TensorMeta

if TYPE_CHECKING:
    from fusion_advisor.library.lower import Lowering

_EPSILON = {"float64": 2.220446049250313e-16, "float32": 1.1920928955078125e-07, "float16": 0.0009765625, "bfloat16": 0.0078125}


def _reduced_dims(op: OpNode, rank: int) -> tuple[int, ...]:
    dims = op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("dim")
    if dims is None or dims == ():
        return tuple(range(rank))
    return (dims,) if isinstance(dims, int) else tuple(int(dim) for dim in dims)  # type: ignore[arg-type, union-attr]


def _reduction(kind: str, *, is_mean: bool = False) -> Rule:
    def rule(lowering: Lowering, op: OpNode, where: Index) -> int:
        source = op.args[0]
        assert isinstance(source, Ref)
        meta = lowering.meta(source.index)
        keepdim = bool(op.args[2]) if len(op.args) > 2 else bool(dict(op.kwargs).get("keepdim", False))
        dims = _reduced_dims(op, len(meta.shape))
        inner, variables = lowering.reduction_index(op, meta, dims, where, keepdim=keepdim)
        number = lowering.row_element(source.index, inner, op)
        result = lowering.reduce(kind, number, variables)
        if is_mean:
            result = lowering.make("div", result, lowering.emit(Value(op="size", dim=-1, dtype=lowering.values[result].dtype)))
        return result

    return rule


def _norm_parts(lowering: Lowering, op: OpNode, where: Index) -> tuple[int, Index, frozenset[int], TensorMeta]:
    source, shape = op.args[0], op.args[1]
    assert isinstance(source, Ref) and isinstance(shape, tuple)
    meta = lowering.meta(source.index)
    dims = range(len(meta.shape) - len(shape), len(meta.shape))
    inner, variables = lowering.reduction_index(op, meta, tuple(dims), where, keepdim=True)
    return lowering.row_element(source.index, inner, op), inner, variables, meta


def _scaled(lowering: Lowering, op: OpNode, where: Index, number: int, *, weight: int, bias: int | None) -> int:
    shape = op.args[1]
    assert isinstance(shape, tuple)
    tail = where[len(where) - len(shape) :]
    if len(op.args) > weight and op.args[weight] is not None:
        number = lowering.make("mul", number, lowering.element(op.args[weight], tail, op))
    if bias is not None and len(op.args) > bias and op.args[bias] is not None:
        number = lowering.make("add", number, lowering.element(op.args[bias], tail, op))
    return number


def _mean_of(lowering: Lowering, number: int, variables: frozenset[int]) -> int:
    total = lowering.reduce("sum", number, variables)
    return lowering.make("div", total, lowering.emit(Value(op="size", dim=-1, dtype=lowering.values[total].dtype)))


def _layer_norm(lowering: Lowering, op: OpNode, where: Index) -> int:
    value, inner, variables, _ = _norm_parts(lowering, op, where)
    if inner != where:
        raise CannotLower("FA604", "a layer_norm is read at another place than its own row element")
    dtype = lowering.values[value].dtype
    centred = lowering.make("sub", value, _mean_of(lowering, value, variables))
    variance = _mean_of(lowering, lowering.make("mul", centred, centred), variables)
    eps = op.args[4] if len(op.args) > 4 else 1e-5
    scale = lowering.make("rsqrt", lowering.make("add", variance, lowering.element(eps, where, op, dtype)))
    return _scaled(lowering, op, where, lowering.make("mul", centred, scale), weight=2, bias=3)


def _rms_norm(lowering: Lowering, op: OpNode, where: Index) -> int:
    value, inner, variables, meta = _norm_parts(lowering, op, where)
    element = value if inner == where else lowering.argument(op, 0, where)
    eps = op.args[3] if len(op.args) > 3 else None
    eps = _EPSILON[meta.dtype] if eps is None else eps
    mean = _mean_of(lowering, lowering.make("mul", value, value), variables)
    scale = lowering.make("rsqrt", lowering.make("add", mean, lowering.element(eps, where, op, lowering.values[value].dtype)))
    return _scaled(lowering, op, where, lowering.make("mul", element, scale), weight=2, bias=None)


def _softmax(lowering: Lowering, op: OpNode, where: Index) -> int:
    source, dim = op.args[0], op.args[1]
    assert isinstance(source, Ref) and isinstance(dim, int)
    meta = lowering.meta(source.index)
    inner, variables = lowering.reduction_index(op, meta, (dim,), where, keepdim=True)
    if inner != where:
        raise CannotLower("FA604", "a softmax is read at another place than its own row element")
    value = lowering.row_element(source.index, inner, op)
    shifted = lowering.make("sub", value, lowering.reduce("max", value, variables))
    exponential = lowering.make("exp", shifted)
    total = lowering.reduce("sum", exponential, variables)
    if "log_softmax" in op.target:
        return lowering.make("sub", shifted, lowering.make("log", total))
    return lowering.make("div", exponential, total)


def _cat(lowering: Lowering, op: OpNode, where: Index) -> int:
    """A cat is a choice by index: piece k where the index lies in its range, each load guarded by that range."""
    pieces = op.args[0]
    assert isinstance(pieces, tuple)
    rank = len(op.outputs[0].shape)
    dim = int(op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("dim", 0)) % rank  # type: ignore[arg-type]
    variable, shift = where[dim]
    if variable is None or len(pieces) > 4:
        raise CannotLower("FA603", f"a cat of {len(pieces)} pieces along a dim that is not iterated has no lowering")
    place = lowering.emit(Value(op="index", dim=variable, dtype="int64"))
    if shift:
        place = lowering.make("add", place, lowering.const(shift, "int64"))
    dtype = compute_dtype(op.outputs[0].dtype)
    result, start = None, op.outputs[0].shape[dim]
    for piece in reversed(pieces):
        assert isinstance(piece, Ref)
        start -= lowering.meta(piece.index).shape[dim]
        moved = (*where[:dim], (variable, shift - start), *where[dim + 1 :])
        if result is None:
            after = lowering.make("ge", place, lowering.const(start, "int64"), dtype="bool")
            result = lowering.guarded(piece.index, moved, after, dtype)
        else:
            here = lowering.make(
                "lt", place, lowering.const(start + lowering.meta(piece.index).shape[dim], "int64"), dtype="bool"
            )
            guard = (
                here
                if start == 0
                else lowering.make(
                    "and", here, lowering.make("ge", place, lowering.const(start, "int64"), dtype="bool"), dtype="bool"
                )
            )
            result = lowering.make("where", here, lowering.guarded(piece.index, moved, guard, dtype), result, dtype=dtype)
    assert result is not None
    return result


SPECIAL: dict[str, Rule] = {
    "mean": _reduction("sum", is_mean=True), "sum": _reduction("sum"), "amax": _reduction("max"), "amin": _reduction("min"),
    "layer_norm": _layer_norm, "rms_norm": _rms_norm, "softmax": _softmax, "_softmax": _softmax, "log_softmax": _softmax,
    "_log_softmax": _softmax, "cat": _cat,
}  # fmt: skip
