"""Ops that take a dim together: kept along every other dim, and along a padded one where junk is the op's neutral number."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from fusion_advisor.fuse.dependence.call import Call, Ruled, table
from fusion_advisor.fuse.dependence.kept import Kept, Sign, Span, Stops, Where, same_place
from fusion_advisor.fuse.dependence.pointwise import pointwise

_NEUTRAL: dict[str, float | bool] = {
    "sum": 0, "prod": 1, "amax": -math.inf, "max": -math.inf, "amin": math.inf, "min": math.inf, "any": False, "all": True,
    "logsumexp": -math.inf, "count_nonzero": 0, "softmax": -math.inf,
}  # fmt: skip


def stop_unless_neutral(call: Call, value: Kept, dims: Collection[int], neutral: float | None) -> None:
    """Stop where junk counts in a dim that is taken together.

    Args:
        call: of the op.
        value: that it takes.
        dims: taken together.
        neutral: the number that changes no result; None: there is none.
    """
    gone = [ordinal for dim in dims for ordinal in value.ordinals(dim)]
    rows = [None, *(n for n in range(len(value.places)) if n not in gone)]
    for ordinal in gone:
        known = [value.known(Where(row, ordinal)) for row in rows]
        if neutral is None or not any(one is not None and one == neutral for one in known):
            raise Stops(f"takes all of `{call.padded.name}` together, padding too")


def reduced(call: Call) -> Kept | list[Kept]:
    """Take dims together."""
    name, value = call.name, call.tensor("self")
    dims = call.dims("dim", len(value.axes))
    stop_unless_neutral(call, value, dims, _NEUTRAL.get(name))
    keeps = bool(call.get("keepdim", False))
    axes = tuple(() if dim in dims else own for dim, own in enumerate(value.axes) if keeps or dim not in dims)

    def place(dim: int) -> int | None:
        return None if dim in dims else dim if keeps else dim - sum(one < dim for one in dims)

    stays = {"sum": (0,), "amax": None, "amin": None, "any": None, "all": None, "mean": (0,)}.get(name, ())
    found = same_place(value, axes, place, affine=None, live=frozenset(), fill=None, bound=None)
    facts = {where: number for where, number in found.facts.items() if stays is None or number in stays}
    mixes = any(value.is_long(dim) for dim in dims)
    is_number = name in ("sum", "mean", "amax", "amin", "var", "std", "linalg_vector_norm", "norm", "prod", "count_nonzero")
    span = value.span if is_number else Span.FINITE if name in ("any", "all", "count_nonzero") else Span.ANY
    if name == "logsumexp" and value.span is Span.FINITE:
        span = Span.FINITE
    sign = Sign.NOT_NEGATIVE if name in ("var", "std", "linalg_vector_norm", "norm", "any", "all", "count_nonzero") else Sign.ANY
    sign = value.sign if name in ("sum", "mean", "amax", "amin") else sign
    return call.made(
        replace(found, facts=facts, span=span, sign=sign, is_copied=value.is_copied and (not mixes or not found.places))
    )


def extreme(call: Call) -> Kept | list[Kept]:
    """Take the largest or smallest along one dim, with its place; of two tensors, element by element."""
    if call.get("other") is not None:
        return pointwise(call)
    if call.get("dim") is None:
        return reduced(call)
    return ordered(call)


def ordered(call: Call) -> Kept | list[Kept]:
    """Order or choose elements along a dim that does not grow; places in it are bounded by its size."""
    value = call.tensor("self")
    rank = len(value.axes)
    dim = call.get("dim")
    dims = list(range(rank)) if dim is None else [int(dim) % rank if rank else 0]
    if any(value.is_long(one) for one in dims):
        raise Stops(f"orders all of `{call.padded.name}` together, padding too")
    found = []
    for at, one in enumerate(call.values):
        shape = one.shape
        stays = len(shape) == rank
        plain = call.plain(one)
        axes = tuple(plain[n if stays else n - sum(d < n for d in dims)] if n in dims else own
                     for n, own in enumerate(value.axes) if stays or n not in dims)  # fmt: skip
        span = value.span if one.is_floating_point() else Span.FINITE
        size = call.node.all_input_nodes[0].meta["val"].shape[dims[0]] if len(dims) == 1 and rank else None
        found.append(
            call.made(
                Kept(
                    axes=axes, span=span, sign=value.sign if one.is_floating_point() else Sign.NOT_NEGATIVE,
                    is_copied=value.is_copied, is_free=value.is_free,
                    bound=size if isinstance(size, int) and not one.is_floating_point() and _gives_places(call, at) else None,
                ),
                at,
            )
        )  # fmt: skip
    return found if isinstance(call.node.meta["val"], tuple | list) else found[0]


def _gives_places(call: Call, at: int) -> bool:
    return call.name in ("argmax", "argmin", "argsort") or at == 1


def softmaxed(call: Call) -> Kept:
    """Divide by a sum along a dim: junk that is minus infinity has no share."""
    value = call.tensor("self")
    dim = call.dim("dim", len(value.axes))
    is_log = "log" in call.name
    stop_unless_neutral(call, value, [dim], None if is_log else -math.inf)
    own = value.ordinals(dim)
    facts = {where: 0.0 for where, number in value.facts.items() if where.col in own and number == -math.inf and not is_log}
    # A row of which nothing counts is NaN. On a live diagonal each row has an element that counts.
    is_live = value.span is Span.FINITE_OR_MINUS_INFINITY and any(col in own for _, col in value.live)
    is_finite = value.span is Span.FINITE or (is_live and not is_log) or "safe" in call.name
    return call.made(
        Kept(
            axes=value.axes, facts=facts, span=Span.FINITE if is_finite else Span.ANY,
            sign=Sign.ANY if is_log else Sign.NOT_NEGATIVE, is_copied=value.is_copied and not own, is_free=value.is_free,
        )
    )  # fmt: skip


def _rowwise(call: Call, value: Kept, dims: Collection[int]) -> Kept:
    """Return a result of the same axes that takes dims together which do not grow."""
    stop_unless_neutral(call, value, dims, None)
    return call.made(
        Kept(axes=value.axes, span=value.span, is_copied=value.is_copied, is_free=value.is_free)
    )  # fmt: skip


def _plain_operands(call: Call, *names: str) -> None:
    if any(one is not None and one.places for one in map(call.optional, names)):
        raise Stops("takes weights that are padded")


def normed(call: Call) -> Kept:
    """Normalise over the last dims."""
    value = call.tensor("input")
    _plain_operands(call, "weight", "bias")
    count = len(call.get("normalized_shape"))
    found = _rowwise(call, value, range(len(value.axes) - count, len(value.axes)))
    eps = call.get("eps", 1e-5)
    is_finite = value.span is Span.FINITE and (eps is None or eps > 0)
    return replace(found, span=Span.FINITE if is_finite else Span.ANY)


def group_normed(call: Call) -> Kept:
    """Normalise over all dims but the first, group by group."""
    value = call.tensor("input")
    _plain_operands(call, "weight", "bias")
    return _rowwise(call, value, range(1, len(value.axes)))


def batch_normed(call: Call) -> Kept:
    """Scale each channel by statistics of the model; those of a batch take it together."""
    value = call.tensor("input")
    names = ("weight", "bias", "running_mean", "running_var")
    _plain_operands(call, *names)
    is_own = bool(call.get("training", False)) or call.get("running_mean") is None
    return _rowwise(call, value, [n for n in range(len(value.axes)) if n != 1] if is_own else [1])


def counted_up(call: Call) -> Kept | list[Kept]:
    """Accumulate from the first element on: an element reads none after it."""
    value = call.tensor("self")
    dim = call.dim("dim", len(value.axes))
    if value.is_long(dim) and len(value.axes[dim]) > 1:
        raise Stops("accumulates along a dim that is flattened")
    is_copied = value.is_copied and not value.is_long(dim)
    span = Span.FINITE if value.span is Span.FINITE else Span.ANY
    found = [
        call.made(Kept(axes=value.axes, span=span if at == 0 else Span.FINITE, is_copied=is_copied, is_free=value.is_free,
                       sign=value.sign if call.name == "cumsum" else Sign.ANY), at)
        for at in range(len(call.values))
    ]  # fmt: skip
    return found if isinstance(call.node.meta["val"], tuple | list) else found[0]


def differences(call: Call) -> Kept:
    """Subtract from each element the one before it."""
    value = call.tensor("self")
    before, after = call.optional("prepend"), call.optional("append")
    dim = call.dim("dim", len(value.axes), -1)
    if after is not None and value.is_long(dim):
        raise Stops("puts something after a dim that is padded, at its end")
    if before is not None and before.is_long(dim):
        raise Stops("puts something before a dim that is padded")
    if value.is_long(dim) and len(value.axes[dim]) > 1:
        raise Stops("accumulates along a dim that is flattened")
    others = [one for one in (value, before, after) if one is not None]
    axes = (*value.axes[:dim], call.padded.factors(call.values[0].shape[dim]), *value.axes[dim + 1 :])
    if any(one.axes[:dim] != value.axes[:dim] or one.axes[dim + 1 :] != value.axes[dim + 1 :] for one in others):
        raise Stops("joins values whose dims are flattened in different ways")
    return call.made(
        Kept(
            axes=axes, span=max(one.span for one in others), is_free=all(one.is_free for one in others),
            is_copied=all(one.is_copied for one in others) and not value.is_long(dim),
        )
    )  # fmt: skip


def gated(call: Call) -> Kept:
    """Multiply one half of a dim by a function of the other."""
    value = call.tensor("self")
    dim = call.dim("dim", len(value.axes), -1)
    stop_unless_neutral(call, value, [dim], None)
    axes = (*value.axes[:dim], call.padded.factors(call.values[0].shape[dim]), *value.axes[dim + 1 :])
    return call.made(Kept(axes=axes, span=value.span, is_copied=value.is_copied, is_free=value.is_free))


def image_dims(call: Call) -> Kept:
    """Rearrange or resample the last dims of images: the first two may be padded."""
    name = "input" if "input" in call.given else "self"
    value = call.tensor(name)
    outer = max(0, len(value.axes) - (3 if "shuffle" in call.name else 2))
    stop_unless_neutral(call, value, range(outer, len(value.axes)), None)
    plain = call.plain(call.values[0])
    axes = (*value.axes[:outer], *plain[outer:])
    return call.made(Kept(axes=axes, is_copied=value.is_copied, is_free=value.is_free, span=value.span))


def series_dims(call: Call) -> Kept:
    """Resample the last dim of series."""
    value = call.tensor("input" if "input" in call.given else "self")
    stop_unless_neutral(call, value, [len(value.axes) - 1], None)
    axes = (*value.axes[:-1], call.plain(call.values[0])[-1])
    return call.made(Kept(axes=axes, is_copied=value.is_copied, is_free=value.is_free, span=value.span))


RULES: dict[str, Any] = table({
    "sum mean amax amin prod any all var std logsumexp linalg_vector_norm norm count_nonzero": reduced,
    "max min": extreme,
    "argmax argmin sort topk argsort kthvalue median mode": Ruled(ordered),
    "softmax _softmax _safe_softmax log_softmax _log_softmax": softmaxed,
    "layer_norm rms_norm": normed,
    "group_norm instance_norm": group_normed,
    "batch_norm": batch_normed,
    "cumsum cumprod cummax cummin logcumsumexp": counted_up,
    "diff": differences,
    "glu": gated,
    "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d pixel_shuffle pixel_unshuffle adaptive_avg_pool2d": image_dims,
    "upsample_nearest1d upsample_linear1d adaptive_avg_pool1d adaptive_max_pool1d": series_dims,
})  # fmt: skip
