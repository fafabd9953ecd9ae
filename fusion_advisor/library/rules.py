"""How single ATen ops become IR values: the rule tables that ``lower`` works from.

Adding an op is one entry here. A rule is given the op and the index of the wanted element, asks the lowering for the elements of
its arguments and returns the number of the result; a view's rule only rewrites the index.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from fusion_advisor.library.program import Value
from fusion_advisor.records import OpNode, Ref, TensorMeta

if TYPE_CHECKING:
    from fusion_advisor.library.lower import Lowering

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
_EPSILON = {"float64": 2.220446049250313e-16, "float32": 1.1920928955078125e-07, "float16": 0.0009765625, "bfloat16": 0.0078125}

Index = tuple[tuple[int | None, int], ...]
"""Per dim of a value: (loop variable or None, constant offset)."""


class CannotLower(Exception):
    """Why ops cannot become one kernel; ``code`` is explained by ``fusion-advisor explain``."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def compute_dtype(dtype: str) -> str:
    """Return the dtype that a tensor dtype is computed in."""
    if dtype in FLOATS:
        return "float64" if dtype == "float64" else "float32"
    return "bool" if dtype == "bool" else "int64"


# ---------------------------------------------------------------------- views inside a chain


def _reshape_rule(_op: OpNode, before: TensorMeta, where: Index) -> Index:
    sized = [size for size in before.shape if size != 1]
    used = [position for position in where if position[0] is not None]
    if len(used) != len(sized):
        raise CannotLower("FA603", "a reshape inside the chain cannot be folded into an address")
    remaining = iter(used)
    return tuple((None, 0) if size == 1 else next(remaining) for size in before.shape)


def _checked_reshape(op: OpNode, before: TensorMeta, where: Index) -> Index:
    after = op.outputs[0].shape
    if [size for size in before.shape if size != 1] != [size for size in after if size != 1]:
        raise CannotLower("FA603", f"a reshape from {before.shape} to {after} inside the chain cannot be folded into an address")
    return _reshape_rule(op, before, where)


def _transpose_rule(op: OpNode, before: TensorMeta, where: Index) -> Index:
    rank = len(before.shape)
    first, second = (int(arg) % rank for arg in op.args[1:3])  # type: ignore[arg-type]
    moved = list(where)
    moved[first], moved[second] = moved[second], moved[first]
    return tuple(moved)


def _permute_rule(op: OpNode, before: TensorMeta, where: Index) -> Index:
    dims = op.args[1]
    assert isinstance(dims, tuple)
    moved: list[tuple[int | None, int]] = [(None, 0)] * len(where)
    for position, dim in enumerate(dims):
        assert isinstance(dim, int)
        moved[dim % len(before.shape)] = where[position]
    return tuple(moved)


def _unsqueeze_rule(op: OpNode, before: TensorMeta, where: Index) -> Index:
    dim = int(op.args[1]) % (len(before.shape) + 1)  # type: ignore[arg-type]
    return where[:dim] + where[dim + 1 :]


def _expand_rule(_op: OpNode, before: TensorMeta, where: Index) -> Index:
    aligned = where[len(where) - len(before.shape) :]
    return tuple((None, 0) if size == 1 else position for size, position in zip(before.shape, aligned, strict=True))


def _slice_rule(op: OpNode, before: TensorMeta, where: Index) -> Index:
    arguments = [*op.args[1:], *(None,) * 4]
    dim = int(arguments[0] or 0) % len(before.shape)  # type: ignore[arg-type]
    start = int(arguments[1] or 0)  # type: ignore[arg-type]
    if int(arguments[3] or 1) != 1:  # type: ignore[arg-type]
        raise CannotLower("FA603", "a strided slice inside the chain cannot be folded into an address")
    start = max(0, start + before.shape[dim]) if start < 0 else min(start, before.shape[dim])
    variable, shift = where[dim]
    return (*where[:dim], (variable, shift + start), *where[dim + 1 :])


def _same_rule(op: OpNode, _before: TensorMeta, where: Index) -> Index:
    if op.target.startswith("aten.dropout") and len(op.args) > 2 and op.args[2]:
        raise CannotLower("FA601", "live dropout draws random numbers that no kernel of ours reproduces")
    return where


VIEWS: dict[str, Callable[[OpNode, TensorMeta, Index], Index]] = {
    "view": _checked_reshape, "reshape": _checked_reshape, "_unsafe_view": _checked_reshape, "flatten": _checked_reshape,
    "squeeze": _checked_reshape, "unflatten": _checked_reshape, "transpose": _transpose_rule, "permute": _permute_rule,
    "unsqueeze": _unsqueeze_rule, "expand": _expand_rule, "slice": _slice_rule,
    **dict.fromkeys(("alias", "detach", "contiguous", "clone", "dropout", "to", "_to_copy", "type_as", "lift_fresh"), _same_rule),
}  # fmt: skip


# ---------------------------------------------------------------------- pointwise ops

_Rule = Callable[["Lowering", OpNode, Index], int]


def _operands_dtype(lowering: Lowering, op: OpNode) -> str:
    """The compute dtype of a comparison: floats win, then integers."""
    found = [compute_dtype(lowering.meta(arg.index).dtype) for arg in op.args if isinstance(arg, Ref)]
    found += [
        "float32" if isinstance(arg, float) else "int64"
        for arg in op.args
        if isinstance(arg, int | float) and not isinstance(arg, bool)
    ]
    for dtype in ("float64", "float32", "int64"):
        if dtype in found:
            return dtype
    return "bool"


def _unary(name: str) -> _Rule:
    def rule(lowering: Lowering, op: OpNode, where: Index) -> int:
        return lowering.make(name, lowering.argument(op, 0, where))

    return rule


def _binary(name: str) -> _Rule:
    def rule(lowering: Lowering, op: OpNode, where: Index) -> int:
        if dict(op.kwargs).get("rounding_mode") is not None:
            raise CannotLower("FA601", f"{op.target} with a rounding mode has no lowering")
        left, right = lowering.argument(op, 0, where), lowering.argument(op, 1, where)
        alpha = dict(op.kwargs).get("alpha", 1)
        if alpha != 1:
            right = lowering.make("mul", right, lowering.element(alpha, where, op))
        return lowering.make(name, left, right)

    return rule


def _compare(name: str) -> _Rule:
    def rule(lowering: Lowering, op: OpNode, where: Index) -> int:
        dtype = _operands_dtype(lowering, op)
        return lowering.make(
            name, lowering.argument(op, 0, where, dtype=dtype), lowering.argument(op, 1, where, dtype=dtype), dtype="bool"
        )

    return rule


def _logical(name: str) -> _Rule:
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
    return lowering.argument(op, 0, where)


def _rsub(lowering: Lowering, op: OpNode, where: Index) -> int:
    return lowering.make("sub", lowering.argument(op, 1, where), lowering.argument(op, 0, where))


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


def _clamp(lowering: Lowering, op: OpNode, where: Index) -> int:
    value = lowering.argument(op, 0, where)
    named = dict(op.kwargs)
    low = op.args[1] if len(op.args) > 1 else named.get("min")
    high = op.args[2] if len(op.args) > 2 else named.get("max")
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


def _leaky_relu(lowering: Lowering, op: OpNode, where: Index) -> int:
    value = lowering.argument(op, 0, where)
    dtype = lowering.values[value].dtype
    slope = op.args[1] if len(op.args) > 1 else 0.01
    positive = lowering.make("gt", value, lowering.const(0, dtype), dtype="bool")
    return lowering.make("where", positive, value, lowering.make("mul", value, lowering.element(slope, where, op)), dtype=dtype)


def _addcmul(lowering: Lowering, op: OpNode, where: Index) -> int:
    scale = dict(op.kwargs).get("value", 1)
    product = lowering.make("mul", lowering.argument(op, 1, where), lowering.argument(op, 2, where))
    if scale != 1:
        product = lowering.make("mul", product, lowering.element(scale, where, op))
    return lowering.make("add", lowering.argument(op, 0, where), product)


POINTWISE: dict[str, _Rule] = {
    **{name: _unary(name) for name in (
        "neg", "abs", "exp", "exp2", "log", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "erf", "sin",
        "cos", "floor", "ceil", "trunc", "round", "sign",
    )},
    "add": _binary("add"), "sub": _binary("sub"), "mul": _binary("mul"), "div": _binary("div"), "true_divide": _binary("div"),
    "maximum": _binary("maximum"), "minimum": _binary("minimum"), "remainder": _binary("remainder"), "rsub": _rsub, "pow": _pow,
    **{name: _compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: _logical(op) for name, op in (
        ("__and__", "and"), ("__or__", "or"), ("__xor__", "xor"), ("logical_and", "and"), ("logical_or", "or"),
        ("logical_not", "not"), ("bitwise_and", "and"), ("bitwise_or", "or"), ("bitwise_not", "not"),
    )},
    "to": _to, "_to_copy": _to, "type_as": _to, "silu": _silu, "gelu": _gelu, "relu": _relu, "clamp": _clamp, "where": _where,
    "masked_fill": _masked_fill, "leaky_relu": _leaky_relu, "addcmul": _addcmul,
}  # fmt: skip


# ---------------------------------------------------------------------- reductions, normalisations, cat


def _reduced_dims(op: OpNode, rank: int) -> tuple[int, ...]:
    dims = op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("dim")
    if dims is None or dims == ():
        return tuple(range(rank))
    return (dims,) if isinstance(dims, int) else tuple(int(dim) for dim in dims)  # type: ignore[arg-type, union-attr]


def _reduction(kind: str, *, is_mean: bool = False) -> _Rule:
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


SPECIAL: dict[str, _Rule] = {
    "mean": _reduction("sum", is_mean=True), "sum": _reduction("sum"), "amax": _reduction("max"), "amin": _reduction("min"),
    "layer_norm": _layer_norm, "rms_norm": _rms_norm, "softmax": _softmax, "_softmax": _softmax, "log_softmax": _softmax,
    "_log_softmax": _softmax, "cat": _cat,
}  # fmt: skip

LOWERABLE = frozenset(POINTWISE) | frozenset(SPECIAL) | frozenset(VIEWS)
"""Base names of the ATen ops that some kernel can compute."""
