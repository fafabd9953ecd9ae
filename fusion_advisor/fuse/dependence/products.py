"""Products, convolutions and attention: kept where no padded dim is summed over, or where junk has a factor of zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fusion_advisor.fuse.dependence.call import Call, Ruled, joined, table
from fusion_advisor.fuse.dependence.kept import Axes, Kept, Long, Sign, Span, Stops, Where, same_place
from fusion_advisor.fuse.dependence.reductions import stop_unless_neutral
from fusion_advisor.runtime.torch_internals import symbolic_sizes

_BATCH = "ABCDEFGH"


def contracted(call: Call, operands: Sequence[Kept], labels: Sequence[str], result: str) -> Kept:
    """Multiply operands element by element and sum over the labels that the result lacks.

    Args:
        call: of the op.
        operands: one or two.
        labels: of each operand's dims.
        result: labels of the result's dims.
    """
    own: dict[str, tuple[Any, ...]] = {}
    for value, names in zip(operands, labels, strict=True):
        for dim, name in enumerate(names):
            here, known = value.axes[dim], own.get(name, ())
            if names.count(name) > 1 and value.is_long(dim):
                raise Stops("takes the diagonal of a dim that is padded")
            grows = _is_long(known) or _is_long(here)
            if grows and known and here and known != here:
                raise Stops("joins values whose dims are flattened in different ways")
            own[name] = known if grows and known else here or known
    axes = tuple(own[name] for name in result)
    mixes = False
    for name, factors in own.items():
        if name not in result and _is_long(factors):
            _stop_unless_zero(call, operands, labels, name, result)
            mixes = True
    return call.made(
        Kept(
            axes=axes, span=Span.FINITE if all(one.span is Span.FINITE for one in operands) else Span.ANY,
            sign=Sign.NOT_NEGATIVE if all(one.sign >= Sign.NOT_NEGATIVE for one in operands) else Sign.ANY,
            is_copied=not mixes and all(one.is_copied for one in operands), is_free=all(one.is_free for one in operands),
        )
    )  # fmt: skip


def _stop_unless_zero(call: Call, operands: Sequence[Kept], labels: Sequence[str], name: str, result: str) -> None:
    """Stop unless junk along a label that is summed over is zero in one operand and finite in the others."""
    infinite = False
    for value, names in zip(operands, labels, strict=True):
        if name not in names:
            continue
        rows = [None, *(n for n, (dim, _) in enumerate(value.places) if names[dim] in result)]
        is_zero = all(
            any((number := value.known(Where(row, ordinal))) is not None and number == 0 for row in rows)
            for ordinal in value.ordinals(names.index(name))
        )
        others = [one for one in operands if one is not value]
        if is_zero and value.ordinals(names.index(name)):
            if all(one.span is Span.FINITE for one in others):
                return
            infinite = True
    size = call.padded.name
    raise Stops(
        f"multiplies padding of `{size}` by zero, and it may hold an infinity" if infinite
        else f"sums over all of `{size}`, padding too"
    )  # fmt: skip


def _with_bias(found: Kept, bias: Kept | None) -> Kept:
    if bias is None:
        return found
    axes, _ = joined([found, bias])
    if [own for own in axes if _is_long(own)] != [own for own in found.axes if _is_long(own)]:
        raise Stops("joins values whose dims are flattened in different ways")
    return replace(
        found, span=max(found.span, bias.span), sign=Sign.ANY, is_copied=found.is_copied and bias.is_copied,
        is_free=found.is_free and bias.is_free,
    )  # fmt: skip


def _is_long(factors: Sequence[Any]) -> bool:
    return any(isinstance(factor, Long) for factor in factors)


def linear(call: Call) -> Kept:
    """Multiply rows by a weight."""
    value, weight = call.tensor("input"), call.tensor("weight")
    batch = _BATCH[: len(value.axes) - 1]
    if len(weight.axes) != 2 or len(value.axes) > len(_BATCH):
        raise Stops("calls an op in a form that no rule covers")
    return _with_bias(contracted(call, [value, weight], [f"{batch}k", "nk"], f"{batch}n"), call.optional("bias"))


def matmul(call: Call) -> Kept:
    """Multiply matrices, in batches or not."""
    first, second = (call.tensor(name) for name in _names(call))
    one, other = len(first.axes), len(second.axes)
    if max(one, other) > len(_BATCH):
        raise Stops("calls an op in a form that no rule covers")
    batch = _BATCH[: max(one, other, 2) - 2]
    left = "k" if one == 1 else f"{batch[len(batch) - one + 2 :]}mk"
    right = "k" if other == 1 else f"{batch[len(batch) - other + 2 :]}kn"
    result = f"{batch}{'' if one == 1 else 'm'}{'' if other == 1 else 'n'}"
    return contracted(call, [first, second], [left, right], result)


_OPERANDS = (
    ("batch1", "batch2"), ("mat1", "mat2"), ("mat", "vec"), ("vec1", "vec2"), ("self", "other"), ("self", "mat2"),
    ("self", "vec"), ("self", "vec2"), ("self", "tensor"),
)  # fmt: skip
"""Names of a product's operands, those that say the most first."""


def _names(call: Call) -> tuple[str, str]:
    return next(pair for pair in _OPERANDS if all(name in call.given for name in pair))


def summed_product(call: Call) -> Kept:
    """Add a product of matrices to a tensor."""
    return _with_bias(matmul(call), call.tensor("self"))


def einsum(call: Call) -> Kept:
    """Multiply and sum by an equation of letters."""
    equation = str(call.get("equation")).replace(" ", "")
    operands = [call.state(node) for node in call.get("tensors")]
    if "." in equation or "->" not in equation or len(operands) > 2:
        raise Stops("calls an op in a form that no rule covers")
    left, _, result = equation.partition("->")
    return contracted(call, operands, left.split(","), result)


def outer(call: Call) -> Kept:
    """Multiply each element of a vector by each of another."""
    first, second = (call.tensor(name) for name in _names(call))
    return contracted(call, [first, second], ["m", "n"], "mn")


def convolved(call: Call) -> Kept:
    """Slide windows over dims: along a padded one, windows must lie inside of it."""
    value, weight, bias = call.tensor("input"), call.tensor("weight"), call.optional("bias")
    spatial = len(weight.axes) - 2
    is_transposed = call.get("transposed", "transpose" in str(call.node.target))
    if weight.places or (bias is not None and bias.places):
        raise Stops("takes weights that are padded")
    if is_transposed:
        stop_unless_neutral(call, value, range(len(value.axes) - spatial - 1, len(value.axes)), None)
    stop_unless_neutral(call, value, [len(value.axes) - spatial - 1], None)
    return _windows(call, value, spatial, call.get("padding", 0))


def pooled(call: Call) -> Kept:
    """Take means or maxima of windows."""
    value = call.tensor("self")
    spatial = 1 if "1d" in str(call.node.target) else 2 if "2d" in str(call.node.target) else 3
    if call.get("ceil_mode", False):
        stop_unless_neutral(call, value, range(len(value.axes) - spatial, len(value.axes)), None)
    return replace(_windows(call, value, spatial, call.get("padding", 0)), span=value.span)


def _windows(call: Call, value: Kept, spatial: int, padding: Any) -> Kept:
    outside = len(value.axes) - spatial
    plain = call.plain(call.values[0])
    axes: list[Any] = list(plain)
    slides = False
    for dim, own in enumerate(value.axes):
        if not value.is_long(dim):
            continue
        if dim < outside:
            axes[dim] = own
            continue
        slides = True
        around = padding if not isinstance(padding, list | tuple) else padding[(dim - outside) % len(padding)]
        if len(own) > 1 or around not in (0, "valid"):
            raise Stops(f"reads past the end of `{call.padded.name}`, where padding lies")
    return call.made(
        Kept(axes=tuple(axes), span=Span.FINITE if value.span is Span.FINITE else Span.ANY,
             is_copied=value.is_copied and not slides, is_free=value.is_free)
    )  # fmt: skip


def attention(call: Call) -> Kept:
    """Mix values by the shares of their keys: junk keys need a mask, or an order of time."""
    query, key, value = (call.tensor(name) for name in ("query", "key", "value"))
    mask = call.optional("attn_mask")
    rank = len(query.axes)
    if not rank == len(key.axes) == len(value.axes):
        raise Stops("calls an op in a form that no rule covers")
    shares = bool(call.get("enable_gqa", False))
    batch, _ = joined([_batch(query, shares=False), *(_batch(one, shares=shares) for one in (key, value))])
    rows, keys = query.axes[-2], key.axes[-2]
    if any(one.is_long(len(one.axes) - 1) for one in (query, key)):
        raise Stops(f"sums over all of `{call.padded.name}`, padding too")
    if (key.is_long(rank - 2) or value.is_long(rank - 2)) and keys != value.axes[-2]:
        raise Stops("joins values whose dims are flattened in different ways")
    axes = (*batch, rows, value.axes[-1])
    is_mixed = key.is_long(len(key.axes) - 2)
    _stop_unless_fits(mask, axes, (*batch, rows, keys))
    if is_mixed:
        _stop_unless_masked(call, mask, rows, keys)
        if max(key.span, value.span) is not Span.FINITE:
            raise Stops(f"multiplies padding of `{call.padded.name}` by zero, and it may hold an infinity")
    given = [query, key, value, *([mask] if mask is not None else [])]
    is_finite = all(one.span is Span.FINITE for one in (query, key, value))  # a row of which nothing counts gives zeros
    is_finite = is_finite and (mask is None or mask.span <= Span.FINITE_OR_MINUS_INFINITY)
    return call.made(
        Kept(
            axes=axes, span=Span.FINITE if is_finite else Span.ANY, is_free=all(one.is_free for one in given),
            is_copied=not is_mixed and all(one.is_copied for one in given) and not call.get("is_causal", False),
        )
    )  # fmt: skip


def _batch(value: Kept, *, shares: bool) -> Kept:
    """Return the dims ahead of rows and columns, without that of heads where several queries share one."""
    if shares and value.is_long(len(value.axes) - 3):
        raise Stops("calls an op in a form that no rule covers")
    return Kept(axes=(*value.axes[:-3], ()) if shares else value.axes[:-2])


def _stop_unless_fits(mask: Kept | None, axes: Axes, scores: Axes) -> None:
    if mask is not None and mask.fill is None:
        found, _ = joined([Kept(axes=scores), Kept(axes=mask.axes)])
        if [own for own in found if _is_long(own)] != [own for own in scores if _is_long(own)] or len(axes) != len(scores):
            raise Stops("joins values whose dims are flattened in different ways")


def _stop_unless_masked(call: Call, mask: Kept | None, rows: Any, keys: Any) -> None:
    """Stop unless no kept row gives a junk key a share."""
    if len(keys) != 1:
        raise Stops("attends to a dim that is flattened")
    if call.get("is_causal", False):
        if len(rows) == 1 and isinstance(rows[0], Long):
            later = call.padded.difference(keys[0].size, rows[0].size)
            if later is not None and symbolic_sizes.is_at_least(later, 0):
                return
        raise Stops(f"attends to all of `{call.padded.name}`, padding too")
    if mask is None:
        raise Stops(f"attends to all of `{call.padded.name}`, padding too, without a mask")
    dim = len(mask.axes) - 1
    found: list[Any] = []
    for ordinal in mask.ordinals(dim):
        found += [mask.known(Where(row, ordinal)) for row in (None, *range(len(mask.places))) if row != ordinal]
    is_flag = call.given["attn_mask"].meta["val"].dtype.is_floating_point is False
    if not any(one is not None and (not one if is_flag else one == -math.inf) for one in found):
        raise Stops(f"attends to all of `{call.padded.name}`, and its mask may let padding through")


def distances(call: Call) -> Kept:
    """Measure the distance of each row of one matrix to each of another."""
    first, second = call.tensor("x1"), call.tensor("x2")
    if len(first.axes) > len(_BATCH):
        raise Stops("calls an op in a form that no rule covers")
    rank = max(len(first.axes), len(second.axes)) - 2
    labels = [f"{_BATCH[rank - len(one.axes) + 2 : rank]}{end}" for one, end in ((first, "mk"), (second, "nk"))]
    if any(one.is_long(len(one.axes) - 1) for one in (first, second)):
        raise Stops(f"sums over all of `{call.padded.name}`, padding too")
    return contracted(call, [first, second], labels, f"{_BATCH[:rank]}mn")


def similarity(call: Call) -> Kept:
    """Compare two tensors along a dim."""
    operands = [call.tensor(name) for name in ("x1", "x2")]
    axes, targets = joined(operands)
    del targets
    dim = call.dim("dim", len(axes), 1)
    if any(isinstance(factor, Long) for factor in axes[dim]):
        raise Stops(f"sums over all of `{call.padded.name}`, padding too")
    whole = Kept(axes=axes, is_copied=all(one.is_copied for one in operands), is_free=all(one.is_free for one in operands))
    left = (*axes[:dim], *axes[dim + 1 :])
    return call.made(same_place(whole, left, lambda own: None if own == dim else own - (own > dim)))


RULES = table({
    "linear": linear,
    "matmul mm bmm mv dot vdot": matmul,
    "addmm baddbmm addmv": summed_product,
    "einsum": einsum,
    "outer ger": outer,
    "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d": Ruled(convolved),
    "avg_pool1d avg_pool2d max_pool1d max_pool2d": pooled,
    "scaled_dot_product_attention": attention,
    "cdist": distances,
    "cosine_similarity": similarity,
})  # fmt: skip
