"""Ops that compute each element from the elements at its place: always kept. Most of the work is what masks are known to hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from fusion_advisor.fuse.dependence.call import Call, joined, leaves, table
from fusion_advisor.fuse.dependence.kept import Affine, Kept, Sign, Span, Stops, Where, moved
from fusion_advisor.fuse.dependence.value_ranges import (
    CASTS,
    FINITE_OPS,
    INFINITE_AT_ZERO,
    OTHER_OPS,
    Seen,
    chosen,
    operands_of,
    seen_at,
    sign_of,
    span_at,
)  # fmt: skip
from fusion_advisor.runtime.torch_internals import symbolic_sizes

_COMPARISONS = frozenset(["eq", "ne", "gt", "ge", "lt", "le"])
_ANDS = frozenset(["logical_and", "bitwise_and", "__and__"])
_ORS = frozenset(["logical_or", "bitwise_or", "__or__"])


def pointwise(call: Call) -> Kept:
    """Keep each element, and find out what masks hold."""
    nodes = [leaf for leaf in leaves(list(call.given.values())) if isinstance(leaf, Node)]
    nodes = [node for node in dict.fromkeys(nodes) if isinstance(node.meta.get("val"), torch.Tensor)]
    nodes = nodes[:1] if call.name in CASTS else nodes  # the others lend their type alone
    operands = [call.state(node) for node in nodes]
    axes, targets = joined(operands)
    there = [moved(one, axes, target) for one, target in zip(operands, targets, strict=True)]
    own = dict(zip(nodes, there, strict=True))
    rank = call.values[0].dim()
    axes = ((),) * (rank - len(axes)) + axes
    fill = _value(call, own, lambda one: one.fill)
    facts, live = {}, set()
    affine = _affine(call, own)
    for where in _places(call, own, axes):
        number = _at(call, own, where)
        if number is not None and fill is None:
            facts[where] = number
        if where.is_diagonal and where.row is not None and (span_at(call, own, where) is Span.FINITE or _is_finite(number)):
            live.add((where.row, where.col))
    return call.made(
        Kept(
            axes=axes, fill=fill, facts=facts, live=frozenset(live), affine=affine, span=span_at(call, own, None),
            sign=sign_of(call, own), is_copied=all(one.is_copied for one in operands),
            is_free=all(one.is_free for one in operands), bound=_bound(call, operands),
        )
    )  # fmt: skip


def _is_finite(number: Any) -> bool:
    return number is not None and math.isfinite(number)


def _places(call: Call, own: dict[Node, Kept], axes: Any) -> Iterator[Where]:
    """Yield elements of the result that something may be known of."""
    found = dict.fromkeys(where for one in own.values() for where in one.facts)
    count = len(Kept(axes=axes).places)
    pairs = [(row, col) for row in range(count) for col in range(count) if row != col] if count <= _MOST_AXES else []
    is_mask = call.name in _COMPARISONS
    if is_mask and any(one.affine for one in own.values()):
        found.update(dict.fromkeys(Where(row, col, is_diagonal) for row, col in pairs for is_diagonal in (False, True)))
    found.update(dict.fromkeys(Where(row, col, True) for one in own.values() for row, col in one.live))
    yield from found


_MOST_AXES = 4


def _at(call: Call, own: dict[Node, Kept], where: Where) -> Any:
    """Return the number that elements are; None where it is not known."""
    name = call.name
    if name in _COMPARISONS:
        found = _compared(call, own, where, name)
        if found is not None:
            return found
    number = _value(call, own, lambda one: one.known(where))
    return _absorbed(call, own, where, name) if number is None else number


def _value(call: Call, own: dict[Node, Kept], known: Callable[[Kept], Any]) -> Any:
    """Compute the op on known numbers; None where one is not known, or where it cannot be computed."""
    numbers = {node: known(one) for node, one in own.items()}
    if any(number is None for number in numbers.values()) or not numbers:
        return None
    dtype = call.values[0].dtype
    if call.name in CASTS:
        (number, *_), (node, *_) = numbers.values(), numbers
        if not math.isfinite(number) and not dtype.is_floating_point:  # devices differ in what that is
            return None
        return torch.full((), number, dtype=node.meta["val"].dtype).to(dtype).item()
    target = call.node.target
    assert callable(target)

    def given(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)([given(item) for item in value])
        if not isinstance(value, Node):
            return value
        if value not in numbers:
            raise LookupError
        return torch.full((), numbers[value], dtype=value.meta["val"].dtype)

    try:
        return target(*given(call.node.args), **{name: given(value) for name, value in call.node.kwargs.items()}).item()
    except (LookupError, RuntimeError, TypeError, ValueError):  # an open size among its numbers, or an op that a CPU lacks
        return None


def _absorbed(call: Call, own: dict[Node, Kept], where: Where, name: str) -> Any:
    """Return what elements are though one operand is not known there: 0 times a number is 0."""
    seen = [seen_at(call, own, value, where) for value in operands_of(call)]
    if name in ("where", "masked_fill"):
        mask, yes, no = chosen(name, seen)
        return None if mask.number is None else (yes if mask.number else no).number
    is_flag = call.values[0].dtype == torch.bool
    known = [one.number for one in seen[:2] if one.number is not None]
    if name in _ANDS:
        return (False if is_flag else 0) if any(not number for number in known) else None
    if name in _ORS:
        return True if is_flag and any(known) else None
    return _absorbed_number(seen, known, name) if len(seen) > 1 and call.number("alpha", 1) == 1 else None


def _absorbed_number(seen: Sequence[Seen], known: Sequence[Any], name: str) -> Any:
    first, second = seen[:2]
    finite = first.span is Span.FINITE and second.span is Span.FINITE
    if name in ("mul", "multiply"):
        return 0 if finite and 0 in known else None
    if name == "div":
        return 0 if finite and first.number == 0 and second.sign is Sign.POSITIVE else None
    is_first = first.number == -math.inf and second.span is Span.FINITE
    is_second = name == "add" and second.number == -math.inf and first.span is Span.FINITE
    return -math.inf if name in ("add", "sub") and (is_first or is_second) else None


def _compared(call: Call, own: dict[Node, Kept], where: Where, name: str) -> bool | None:
    """Compare places: past the end of one axis, up to the end of another."""
    first, second = (_place(call, own, value) for value in operands_of(call)[:2])
    if first is None or second is None or where.row is None:
        return None
    apart = first.plus(second, -1)
    sizes = Kept(axes=_axes(own)).sizes
    shift = call.padded.difference(sizes[where.col], sizes[where.row])
    if shift is None:
        return None
    low = high = None
    if not apart.times:
        low = high = apart.offset
    elif apart.times == {where.col: 1, where.row: -1}:
        low = apart.offset + shift + (0 if where.is_diagonal else 1)
        high = low if where.is_diagonal else None
    elif apart.times == {where.col: -1, where.row: 1}:
        high = apart.offset - shift - (0 if where.is_diagonal else 1)
        low = high if where.is_diagonal else None
    return _decided(name, low, high)


def _decided(name: str, low: Any, high: Any) -> bool | None:
    """Return how a difference between two bounds compares with zero."""
    above, at_least = (low is not None and symbolic_sizes.is_at_least(low, least) for least in (1, 0))
    below, at_most = (high is not None and symbolic_sizes.is_at_least(-high, least) for least in (1, 0))
    is_equal = at_least and at_most
    yes, no = {
        "gt": (above, at_most), "ge": (at_least, below), "lt": (below, at_least), "le": (at_most, above),
        "eq": (is_equal, above or below), "ne": (above or below, is_equal),
    }[name]  # fmt: skip
    return True if yes else False if no else None


def _axes(own: dict[Node, Kept]) -> Any:
    return next(iter(own.values())).axes


def _place(call: Call, own: dict[Node, Kept], value: Any) -> Affine | None:
    """Return an operand as a function of the element's place; a whole number is one."""
    if isinstance(value, Node) and value in own:
        one = own[value]
        is_number = one.fill is not None and not isinstance(one.fill, bool) and float(one.fill).is_integer()
        return Affine({}, int(one.fill)) if is_number and one.fill is not None else one.affine
    number = call.size(value)
    if isinstance(number, bool) or number is None or (isinstance(number, float) and not number.is_integer()):
        return None
    return Affine({}, int(number) if isinstance(number, float) else number) if not isinstance(number, str | list) else None


_WHOLE = (torch.int64, torch.int32)
"""Smaller integers wrap."""


def _affine(call: Call, own: dict[Node, Kept]) -> Affine | None:
    name = call.name
    if call.values[0].dtype not in _WHOLE or name not in CASTS | {"add", "sub", "rsub", "neg", "mul"}:
        return None
    if any(node.meta["val"].dtype not in _WHOLE for node in own):
        return None
    arguments = operands_of(call)
    found = [_place(call, own, value) for value in arguments[: 1 if name in CASTS | {"neg"} else 2]]
    if any(one is None for one in found):
        return None
    first, *others = [one for one in found if one is not None]
    if name in CASTS:
        return first
    zero = Affine({}, 0)
    if name == "neg":
        return zero.plus(first, -1)
    (second,) = others
    if name == "mul":
        return _product(first, second)
    alpha = call.number("alpha", 1)
    if alpha != 1:
        return None
    return first.plus(second) if name == "add" else first.plus(second, -1) if name == "sub" else second.plus(first, -1)


def _product(first: Affine, second: Affine) -> Affine | None:
    for one, other in ((first, second), (second, first)):
        if not other.times and isinstance(other.offset, int):
            return Affine({}, 0).plus(one, other.offset)
    return None


def _bound(call: Call, operands: Sequence[Kept]) -> int | None:
    return operands[0].bound if call.name in CASTS and len(operands) == 1 else None


def max_or_min(call: Call) -> Kept:
    """Of two tensors: an op of its own name otherwise."""
    if call.get("other") is None:
        raise Stops("takes its whole input together")
    return pointwise(call)


RULES = table({" ".join(FINITE_OPS | INFINITE_AT_ZERO | OTHER_OPS): pointwise})
