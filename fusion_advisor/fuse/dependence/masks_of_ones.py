"""What attention masks say in calls whose own mask, of padding, holds ones alone: proved for all sizes of a piece.

Such a mask comes with most prompts, and models look at its values before they build one for attention. A traced graph cannot: it
builds one for each call. Here the graph's integers are followed as counts along a dim, and its booleans as one value, or as a
triangle of keys and queries.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fusion_advisor.capture.graph.fx_nodes import attention_argument
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.rewrite.record import PointRewrite
from fusion_advisor.runtime.torch_internals import symbolic_sizes


@dataclass(frozen=True, slots=True)
class Same:
    """One number everywhere."""

    number: bool | int | float


@dataclass(frozen=True, slots=True)
class Counted:
    """Whole numbers that count up along a dim; everywhere the same without one.

    Attributes:
        start: the first, an expression of sizes.
        dim: counted from the end, -1 the last; None: there is none.
        count: how many.
    """

    start: Any
    dim: int | None = None
    count: Any = 1

    @property
    def last(self) -> Any:
        """The largest."""
        return self.start if self.dim is None else self.start + self.count - 1


@dataclass(frozen=True, slots=True)
class Causal:
    """True where a place along one dim is at most the place along the other, of as many.

    Attributes:
        keys: a dim, counted from the end.
        queries: the other.
        count: places along each.
    """

    keys: int
    queries: int
    count: Any


Known = Same | Counted | Causal


SKIP_MASKS = PointRewrite(
    id="skip-masks",
    title="masks of ones skipped",
    after={"drop-masks": "masks of sizes alone become flags in all calls"},
)


def mask_inputs(region: Region) -> dict[Node, int]:
    """Return the masks of whole numbers or booleans that a call passes, each with its place among the inputs."""
    inputs = [node for node in region.graph.graph.nodes if node.op == "placeholder"]
    return {
        node: place
        for place, (node, name, role) in enumerate(zip(inputs, region.names, region.roles, strict=True))
        if role == "input" and "mask" in name.rpartition(".")[2] and _is_whole(node.meta.get("val"))
    }


def _is_whole(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.dtype.is_floating_point and not value.dtype.is_complex


def meanings_with_ones(masked: Mapping[Node, Node], ones: Collection[Node], dims: Mapping[Any, Any]) -> dict[Node, str]:
    """Return the attention calls whose mask says no more than a flag where some inputs hold ones: ``causal``, ``all true``.

    Args:
        masked: attention calls of a graph, each with its mask.
        ones: inputs.
        dims: each symbol as an expression of dims.
    """
    followed = _Followed(ones, dims)
    found = {}
    for call, mask in masked.items():
        known = followed.of(mask)
        queries, keys = (followed.size(attention_argument(call, name).meta["val"].shape[-2]) for name in ("query", "key"))
        if isinstance(known, Same) and known.number == (mask.meta["val"].dtype == torch.bool):
            found[call] = "all true"
        elif known == Causal(-1, -2, queries) and queries == keys:
            found[call] = "causal"
    return found


class _Followed:
    """What is known of the values of a graph.

    Args:
        ones: inputs that hold ones alone.
        dims: each symbol as an expression of dims.
    """

    def __init__(self, ones: Collection[Node], dims: Mapping[Any, Any]) -> None:
        self._known: dict[Node, Known | None] = {node: Same(1) for node in ones}
        self._dims = dims

    def size(self, value: Any) -> Any:
        """Return a size in dims of the piece: symbols of one dim are one."""
        found = symbolic_sizes.expression_of(value)
        return found if isinstance(found, int) else found.xreplace(self._dims)

    def of(self, value: Any) -> Known | None:
        """Return what is known of an argument; None where nothing is."""
        if isinstance(value, bool | int | float):
            return Same(value)
        if not isinstance(value, Node):
            return None
        if value not in self._known:
            size = value.meta.get("val")
            self._known[value] = Counted(self.size(size)) if isinstance(size, torch.SymInt) else self._of_op(value)
        return self._known[value]

    def _of_op(self, node: Node) -> Known | None:
        if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        name = node.target._schema.name.removeprefix("aten::")
        rule = _RULES.get(name)
        found = rule(self, node) if rule else None
        return _cast(found, node.meta["val"].dtype) if isinstance(found, Same) else found

    def shape(self, node: Node) -> list[Any]:
        """Return a tensor's sizes."""
        return [self.size(one) for one in node.meta["val"].shape]


def _cast(known: Same, dtype: torch.dtype) -> Same:
    return Same(torch.full((), known.number, dtype=dtype).item())


def _counted(followed: _Followed, node: Node) -> Known | None:
    """``arange`` from 0, or from a start, in steps of one."""
    bounds = [one for one in (followed.of(value) for value in node.args) if one is not None]
    starts = [one.number if isinstance(one, Same) else one.start for one in bounds if not isinstance(one, Causal)]
    if len(starts) != len(node.args) or len(starts) > 3 or starts[2:] not in ([], [1]):
        return None
    if node.meta["val"].dtype.is_floating_point or any(isinstance(start, float) for start in starts):
        return None
    first, end = (0, starts[0]) if len(starts) == 1 else starts[:2]
    return Counted(first, -1, end - first)


def _filled(number: int) -> Callable[[_Followed, Node], Known | None]:
    return lambda _, __: Same(number)


def _full(followed: _Followed, node: Node) -> Known | None:
    known = followed.of(node.args[-1])
    return known if isinstance(known, Same) else None


def _as_it_is(followed: _Followed, node: Node) -> Known | None:
    """Ops that neither move elements nor change numbers."""
    known = followed.of(node.args[0])
    if isinstance(known, Causal) and node.meta["val"].dtype != torch.bool:
        return None
    return None if isinstance(known, Counted) and node.meta["val"].dtype in (torch.bool, torch.uint8, torch.int8) else known


def _moved(followed: _Followed, node: Node) -> Known | None:
    """Ops that move elements: nothing is known of them but that all are one number."""
    known = followed.of(node.args[0])
    return known if isinstance(known, Same) else None


def _sliced(followed: _Followed, node: Node) -> Known | None:
    """Along a dim where nothing changes, or the last query of a triangle: it sees all keys."""
    known = followed.of(node.args[0])
    if not isinstance(known, Counted | Causal):
        return known
    dim, start = (*node.args[1:3], 0, None)[:2]
    rank = node.meta["val"].dim()
    assert isinstance(dim, int)
    from_end = dim - rank if dim >= 0 else dim
    if from_end not in _own_dims(known):
        return known
    if isinstance(known, Causal) and from_end == known.queries and followed.shape(node)[from_end] == 1:
        return Same(number=True) if _start(followed.of(start)) in (-1, known.count - 1) else None
    return None


def _own_dims(known: Counted | Causal) -> tuple[int, ...]:
    """Return the dims along which values differ."""
    if isinstance(known, Causal):
        return known.keys, known.queries
    return () if known.dim is None else (known.dim,)


def _unsqueezed(followed: _Followed, node: Node) -> Known | None:
    known, (_, dim) = followed.of(node.args[0]), node.args
    rank = node.meta["val"].dim()
    assert isinstance(dim, int)
    from_end = dim - rank if dim >= 0 else dim
    return _each_dim(known, lambda own: own if own > from_end else own - 1)


def _each_dim(known: Known | None, change: Callable[[int], int]) -> Known | None:
    if isinstance(known, Counted) and known.dim is not None:
        return replace(known, dim=change(known.dim))
    return replace(known, keys=change(known.keys), queries=change(known.queries)) if isinstance(known, Causal) else known


def _expanded(followed: _Followed, node: Node) -> Known | None:
    """Dims of one place become longer: what counts along such a dim has one value."""
    known = followed.of(node.args[0])
    source, _ = node.args
    assert isinstance(source, Node)
    own = _own_dims(known) if isinstance(known, Counted | Causal) else ()
    return known if all(followed.shape(source)[dim] == followed.shape(node)[dim] for dim in own) else None


def _sum(sign: int) -> Callable[[_Followed, Node], Known | None]:
    def rule(followed: _Followed, node: Node) -> Known | None:
        if node.kwargs.get("alpha", 1) != 1:
            return None
        one, other = map(followed.of, node.args[:2])
        if isinstance(one, Same) and isinstance(other, Same):
            return Same(one.number + sign * other.number)
        more = _start(other)
        return replace(one, start=one.start + sign * more) if isinstance(one, Counted) and more is not None else None

    return rule


def _start(known: Known | None) -> Any:
    """Return the one whole number that a value is; None where it is more than one, or none."""
    if isinstance(known, Same):
        return known.number if isinstance(known.number, int) else None
    return known.start if isinstance(known, Counted) and known.dim is None else None


def _compared(less: str, by: int = 0) -> Callable[[_Followed, Node], Known | None]:
    """``<=`` (``by`` 0) or ``<`` (1) of two arguments, the smaller one first or second."""

    def rule(followed: _Followed, node: Node) -> Known | None:
        pair = [*map(followed.of, node.args[:2])]
        low, high = (_as_count(one) for one in (pair if less == "first" else reversed(pair)))
        if low is None or high is None:
            return None
        if symbolic_sizes.is_at_least(high.start - low.last - by, 0):
            return Same(number=True)
        is_square = low.dim is not None and high.dim is not None and low.dim != high.dim and low.count == high.count
        if is_square and low.start + by == high.start and low.dim is not None and high.dim is not None:
            return Causal(low.dim, high.dim, low.count)
        return None

    return rule


def _as_count(known: Known | None) -> Counted | None:
    if isinstance(known, Same):
        return Counted(int(known.number)) if isinstance(known.number, bool | int) else None
    return known if isinstance(known, Counted) else None


def _both(followed: _Followed, node: Node) -> Known | None:
    """A conjunction."""
    one, other = map(followed.of, node.args[:2])
    if one == other:
        return one
    for known, rest in ((one, other), (other, one)):
        if isinstance(known, Same):
            return rest if known.number else Same(number=False)
    return None


def _chosen(followed: _Followed, node: Node) -> Known | None:
    known = followed.of(node.args[0])
    return followed.of(node.args[1 if known.number else 2]) if isinstance(known, Same) and len(node.args) == 3 else None


def _left_unfilled(followed: _Followed, node: Node) -> Known | None:
    known = followed.of(node.args[1])
    return followed.of(node.args[0]) if known == Same(number=False) else None


def _computed(compute: Callable[[Any, Any], Any]) -> Callable[[_Followed, Node], Known | None]:
    """Compute with two numbers."""

    def rule(followed: _Followed, node: Node) -> Known | None:
        one, other = map(followed.of, node.args[:2])
        if isinstance(one, Same) and isinstance(other, Same) and node.kwargs.get("alpha", 1) == 1:
            return Same(compute(one.number, other.number))
        return None

    return rule


def _negated(followed: _Followed, node: Node) -> Known | None:
    known = followed.of(node.args[0])
    return Same(not known.number) if isinstance(known, Same) and node.meta["val"].dtype == torch.bool else None


_RULES: Mapping[str, Callable[[_Followed, Node], Known | None]] = {
    "arange": _counted,
    **dict.fromkeys(("ones", "new_ones", "ones_like"), _filled(1)),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), _filled(0)),
    **dict.fromkeys(("full", "new_full", "full_like", "scalar_tensor"), _full),
    **dict.fromkeys(("to", "_to_copy", "type_as", "clone", "contiguous", "alias", "detach", "lift_fresh_copy"), _as_it_is),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "select", "squeeze", "permute", "transpose", "index", "narrow"), _moved),
    "slice": _sliced,
    "unsqueeze": _unsqueezed,
    "expand": _expanded,
    "add": _sum(1),
    "sub": _sum(-1),
    "rsub": _computed(lambda one, other: other - one),
    "mul": _computed(operator.mul),
    "le": _compared("first"),
    "lt": _compared("first", 1),
    "ge": _compared("second"),
    "gt": _compared("second", 1),
    "eq": _computed(operator.eq),
    "ne": _computed(operator.ne),
    **dict.fromkeys(("__and__", "bitwise_and", "logical_and"), _both),
    **dict.fromkeys(("logical_not", "bitwise_not"), _negated),
    "where": _chosen,
    "masked_fill": _left_unfilled,
}
