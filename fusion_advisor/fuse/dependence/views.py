"""Ops that show elements in other places, and ops that put tensors side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from fusion_advisor.fuse.dependence.call import Call, Ruled, joined, table
from fusion_advisor.fuse.dependence.kept import Affine, Axes, Kept, Long, Sign, Span, Stops, moved, same_place
from fusion_advisor.runtime.torch_internals import symbolic_sizes


def view(call: Call) -> Kept:
    """Part and join dims: their axes stay in order."""
    value = call.tensor("self")
    if call.get("dtype") is not None:
        raise Stops("reads numbers as others of the same bits")
    shape = [call.padded.written(size) for size in call.values[0].shape]
    if value.fill is not None:
        return call.made(replace(value, axes=call.plain(call.values[0]), facts={}, live=frozenset(), affine=None))
    return call.made(replace(value, axes=_regrouped(call, [factor for dim in value.axes for factor in dim], shape)))


def _regrouped(call: Call, factors: Sequence[Any], shape: Sequence[Any]) -> Axes:
    left = _merged(factors)
    dims = []
    for size in shape:
        own: list[Any] = []
        rest = size
        while rest != 1:
            if not left:
                raise Stops("parts a dim in a way that mixes padding with what is kept")
            factor = left.pop(0)
            is_long = isinstance(factor, Long)
            more = symbolic_sizes.quotient(rest, factor.size if is_long else factor)
            if more is not None:
                own.append(factor)
                rest = call.padded.written(more)
                continue
            parted = None if is_long or call.padded.grows(rest) else symbolic_sizes.quotient(factor, rest)
            if parted is None:
                raise Stops("parts a dim in a way that mixes padding with what is kept")
            own.append(rest)
            left.insert(0, parted)
            rest = 1
        dims.append(tuple(_merged(own)))
    if _merged(left):
        raise Stops("parts a dim in a way that mixes padding with what is kept")
    return tuple(dims)


def _merged(factors: Sequence[Any]) -> list[Any]:
    """Return factors with neighbours that do not grow multiplied, and without ones."""
    found: list[Any] = []
    for factor in factors:
        if isinstance(factor, Long) or not found or isinstance(found[-1], Long):
            found.append(factor)
        else:
            found[-1] = found[-1] * factor
    return [factor for factor in found if isinstance(factor, Long) or factor != 1]


def unsqueezed(call: Call) -> Kept:
    """Add a dim of 1."""
    value = call.tensor("self")
    at = call.dim("dim", len(value.axes) + 1)
    return call.made(replace(value, axes=(*value.axes[:at], (), *value.axes[at:])))


def squeezed(call: Call) -> Kept:
    """Leave dims of 1 out."""
    value = call.tensor("self")
    dims = call.dims("dim", len(value.axes))
    gone = [dim for dim in dims if not value.axes[dim]]
    return call.made(replace(value, axes=tuple(own for dim, own in enumerate(value.axes) if dim not in gone)))


def _permuted(call: Call, value: Kept, order: Sequence[int]) -> Kept:
    axes = tuple(value.axes[dim] for dim in order)
    return call.made(same_place(value, axes, list(order).index))


def permuted(call: Call) -> Kept:
    """Put dims in another order."""
    value = call.tensor("self")
    return _permuted(call, value, [int(dim) % len(value.axes) for dim in call.get("dims")])


def transposed(call: Call) -> Kept:
    """Change two dims' places."""
    value = call.tensor("self")
    rank = len(value.axes)
    names = ("dim0", "dim1") if "dim0" in call.given else ("axis0", "axis1")
    first, second = (call.dim(name, rank) for name in names) if names[0] in call.given else (rank - 2, rank - 1)
    order = list(range(rank))
    if rank > 1:
        order[first], order[second] = second, first
    return _permuted(call, value, order)


def moved_dims(call: Call) -> Kept:
    """Take dims to other places."""
    value = call.tensor("self")
    rank = len(value.axes)
    source, to = ([int(dim) % rank for dim in (one if isinstance(one, list | tuple) else [one])]
                  for one in (call.get("source"), call.get("destination")))  # fmt: skip
    left = iter(dim for dim in range(rank) if dim not in source)
    return _permuted(call, value, [source[to.index(dim)] if dim in to else next(left) for dim in range(rank)])


def expanded(call: Call) -> Kept:
    """Repeat dims of 1."""
    value = call.tensor("self")
    plain = call.plain(call.values[0])
    shift = len(plain) - len(value.axes)
    axes = tuple(value.axes[dim - shift] if dim >= shift and value.axes[dim - shift] else own for dim, own in enumerate(plain))
    return call.made(same_place(value, axes, lambda dim: dim + shift))


def sliced(call: Call) -> Kept:
    """Take elements from a place on: kept ones lie ahead of junk if the place is counted from the start."""
    value = call.tensor("self")
    return _sliced(call, value, call.dim("dim", len(value.axes), 0), call.number("start"), call.number("step", 1))


def _sliced(call: Call, value: Kept, dim: int, start: Any, step: Any = 1) -> Kept:
    start = 0 if start is None else start
    if call.padded.grows(start) or (value.is_long(dim) and not symbolic_sizes.is_at_least(start, 0)):
        raise Stops("counts a place from the end")
    size = call.padded.written(call.values[0].shape[dim])
    before = value.axes[dim]
    if start == 0 and step == 1 and before == (Long(size),):
        return call.made(value)
    if value.is_long(dim) and len(before) > 1:
        if before != call.padded.factors(size) and not _is_all(call, dim):
            raise Stops("takes a part of a dim that is flattened")
        return call.made(value)
    axes = (*value.axes[:dim], call.padded.factors(size), *value.axes[dim + 1 :])
    return call.made(_with_less(same_place(value, axes, lambda own: own), dim, start, step))


def _is_all(call: Call, dim: int) -> bool:
    """Whether a slice leaves nothing of a dim out."""
    whole = call.given["self"].meta["val"].shape[dim]
    is_first = call.number("start", 0) in (0, None) and call.number("step", 1) == 1
    return is_first and call.padded.written(whole) == call.padded.written(call.values[0].shape[dim])


def _with_less(cut: Kept, dim: int, start: Any, step: Any) -> Kept:
    """Return a slice without what was known of junk: what it has past its own end may be kept elements."""
    lost = set(cut.ordinals(dim))
    facts = {where: number for where, number in cut.facts.items() if not lost & {where.row, where.col}}
    affine = cut.affine
    times = 0 if affine is None else sum(affine.times.get(axis, 0) for axis in lost)
    if affine is not None and times:
        affine = Affine(affine.times, affine.offset + times * start) if step == 1 else None
    live = frozenset(pair for pair in cut.live if not lost & set(pair))
    return replace(cut, facts=facts, live=live, affine=affine)


def selected(call: Call) -> Kept:
    """Take one element of a dim, counted from the start."""
    value = call.tensor("self")
    dim, index = call.dim("dim", len(value.axes), 0), call.number("index")
    if call.padded.grows(index) or (value.is_long(dim) and not symbolic_sizes.is_at_least(index, 0)):
        raise Stops("counts a place from the end")
    if value.is_long(dim) and len(value.axes[dim]) > 1:
        raise Stops("takes a part of a dim that is flattened")
    return call.made(without(value, dim))


def without(value: Kept, dim: int) -> Kept:
    """Return a value without a dim, one element of which stays."""
    axes = (*value.axes[:dim], *value.axes[dim + 1 :])
    return same_place(value, axes, lambda own: None if own == dim else own - (own > dim))


def parts(call: Call) -> list[Kept]:
    """Part a dim that does not grow, or a first part of one that does."""
    value = call.tensor("self")
    dim = call.dim("dim", len(value.axes), 0)
    if value.is_long(dim):
        raise Stops("parts a dim that is padded")
    found = []
    for at, one in enumerate(call.values):
        axes = (*value.axes[:dim], call.padded.factors(one.shape[dim]), *value.axes[dim + 1 :])
        found.append(call.made(same_place(value, axes, lambda own: own), at))
    return found


def unbound(call: Call) -> list[Kept]:
    """Take each element of a dim."""
    value = call.tensor("self")
    dim = call.dim("dim", len(value.axes), 0)
    if value.is_long(dim):
        raise Stops("parts a dim that is padded")
    return [call.made(without(value, dim), at) for at in range(len(call.values))]


def _together(values: Sequence[Kept], axes: Axes, targets: Sequence[dict[int, int]], lost: set[int]) -> Kept:
    """Return what is known of values that lie side by side."""
    there = [moved(one, axes, target) for one, target in zip(values, targets, strict=True)]
    first = there[0]
    facts = {
        where: number
        for where, number in first.facts.items()
        if not lost & {where.row, where.col} and all(_is_same(one.known(where), number) for one in there)
    }
    is_one = all(_is_same(one.fill, first.fill) for one in there)
    return Kept(
        axes=axes, facts=facts, fill=first.fill if is_one else None, span=max((one.span for one in there), default=Span.ANY),
        sign=min((one.sign for one in there), default=Sign.ANY), is_copied=all(one.is_copied for one in there),
        is_free=all(one.is_free for one in there),
    )  # fmt: skip


def _is_same(one: Any, other: Any) -> bool:
    return one is not None and one == other and type(one) is type(other)


def joined_along(call: Call) -> Kept:
    """Put tensors one after the other: of what grows, nothing but the last part may."""
    nodes = [node for node in call.get("tensors") if isinstance(node, Node)]
    nodes = [node for node in nodes if node.meta["val"].dim() != 1 or node.meta["val"].shape[0] != 0]
    values = [call.state(node) for node in nodes]
    rank = len(values[0].axes)
    dim = call.dim("dim", rank, 0)
    grows = [value.is_long(dim) for value in values]
    if any(grows[:-1]):
        raise Stops("puts something after a dim that is padded, at its end")
    if grows and grows[-1] and len(values[-1].axes[dim]) > 1 and len(values) > 1:
        raise Stops("puts something before a dim that is flattened")
    bare = [replace(value, axes=(*value.axes[:dim], (), *value.axes[dim + 1 :])) for value in values]
    axes, _ = joined(bare)
    own = call.padded.factors(call.values[0].shape[dim]) if len(values) > 1 else values[0].axes[dim]
    axes = (*axes[:dim], own, *axes[dim + 1 :])
    there = {place: ordinal for ordinal, place in enumerate(Kept(axes=axes).places)}
    targets = [{n: there[place] for n, place in enumerate(value.places) if place in there} for value in values]
    lost = {ordinal for (at, _), ordinal in there.items() if at == dim}
    return call.made(_together(values, axes, targets, lost if len(values) > 1 else set()))


def stacked(call: Call) -> Kept:
    """Put tensors side by side in a dim of their own."""
    values = [call.state(node) for node in call.get("tensors")]
    axes, targets = joined(values)
    dim = call.dim("dim", len(axes) + 1, 0)
    found = _together(values, axes, targets, set())
    own = call.padded.factors(len(values))
    return call.made(replace(found, axes=(*axes[:dim], own, *axes[dim:])))


def padded_with(call: Call) -> Kept:
    """Put a number around: of what grows, nothing after it."""
    value = call.tensor("self")
    if call.get("mode", "constant") != "constant":
        raise Stops("pads with what lies at the borders") if value.places else Stops("calls an op in a form that no rule covers")
    pads = [call.size(one) for one in call.get("pad")]
    axes, lost = list(value.axes), set()
    for back, (left, right) in enumerate(zip(pads[::2], pads[1::2], strict=True), start=1):
        dim = len(axes) - back
        if (left, right) == (0, 0):
            continue
        if value.is_long(dim):
            if right != 0 or len(axes[dim]) > 1 or not isinstance(left, int) or left < 0:
                raise Stops("puts something after a dim that is padded, at its end")
            lost.update(value.ordinals(dim))
        axes[dim] = call.padded.factors(call.values[0].shape[dim])
    found = same_place(value, tuple(axes), lambda own: own)
    number = call.number("value") or 0
    facts = {where: one for where, one in found.facts.items() if one == number and not lost & {where.row, where.col}}
    span = found.span if isinstance(number, int | float) and abs(number) < float("inf") else Span.ANY
    return call.made(
        replace(found, facts=facts, live=frozenset(), affine=None, fill=None, span=span, sign=Sign.ANY, is_copied=value.is_copied)
    )


def repeated(call: Call) -> Kept:
    """Repeat whole tensors: not along a dim that grows."""
    value = call.tensor("self")
    times = [call.size(one) for one in call.get("repeats", call.get("dims"))]
    shift = len(times) - len(value.axes)
    if shift < 0:
        raise Stops("calls an op in a form that no rule covers")
    axes = []
    for dim, count in enumerate(times):
        own = value.axes[dim - shift] if dim >= shift else ()
        if any(isinstance(factor, Long) for factor in own) and count != 1:
            raise Stops("puts something after a dim that is padded, at its end")
        axes.append(own if count == 1 else tuple(_merged([*call.padded.factors(count), *own])))
    return call.made(same_place(value, tuple(axes), lambda dim: dim + shift))


def repeated_each(call: Call) -> Kept:
    """Repeat each element of a dim next to itself."""
    value = call.tensor("self")
    times = call.get("repeats")
    if call.get("dim") is None or not isinstance(times, int):
        raise Stops("repeats elements a number of times that is computed")
    dim = call.dim("dim", len(value.axes))
    own = _merged([*value.axes[dim], times])
    axes = (*value.axes[:dim], tuple(own), *value.axes[dim + 1 :])
    return call.made(same_place(value, axes, lambda one: one))


def turned(call: Call) -> Kept:
    """Turn or shift elements along dims: where these do not grow."""
    value = call.tensor("self")
    dims = call.dims("dims", len(value.axes))
    if any(value.is_long(dim) for dim in dims):
        raise Stops("moves elements along a dim that is padded")
    return call.made(value)


def as_complex(call: Call) -> Kept:
    """Show pairs of numbers as complex ones, or back."""
    value = call.tensor("self")
    is_pair = call.values[0].is_complex()
    if is_pair and value.is_long(len(value.axes) - 1):
        raise Stops("joins pairs along a dim that is padded")
    axes = value.axes[:-1] if is_pair else (*value.axes, (2,))
    return call.made(replace(value, axes=axes, facts={}, fill=None, live=frozenset(), span=Span.ANY, sign=Sign.ANY))


RULES = table({
    "view reshape _unsafe_view _reshape_alias unflatten": Ruled(view, {"size", "shape", "sizes"}),
    "flatten": view,
    "view_as reshape_as": Ruled(view),
    "unsqueeze": unsqueezed,
    "squeeze": squeezed,
    "permute": permuted,
    "transpose swapaxes swapdims t numpy_T mT adjoint": transposed,
    "movedim moveaxis": moved_dims,
    "expand broadcast_to": Ruled(expanded, {"size"}),
    "expand_as": Ruled(expanded),
    "slice": Ruled(sliced, {"end"}),
    "narrow": Ruled(sliced, {"length"}),
    "select": selected,
    "split split_with_sizes chunk tensor_split unsafe_split unsafe_split_with_sizes unsafe_chunk": parts,
    "unbind": unbound,
    "cat concat concatenate": joined_along,
    "stack": stacked,
    "constant_pad_nd pad": padded_with,
    "repeat tile": Ruled(repeated, {"repeats", "dims"}),
    "repeat_interleave": repeated_each,
    "flip roll fliplr flipud": turned,
    "view_as_complex view_as_real": as_complex,
})  # fmt: skip
