"""Linears on few rows, with the norm before and the gate or residual after them: where one GEMV kernel could stand.

At up to 64 rows a linear's time is that of reading its weight, and every small kernel around it is a launch of its own. This
pass finds such places in a graph and writes into them the calls it is given; which kernel a call launches, and whether there is
one for a place, is the caller's business. It runs after GEMMs were merged: a gate and its up projection are one linear then, and
a norm that fed three linears feeds one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion_advisor.capture.graph import written_storages

MOST_ROWS = 64
"""Above, a GEMM is no longer bound by its weight, and cuBLAS wins (measured on an H200)."""

_ATEN = torch.ops.aten
_LINEAR = _ATEN.linear.default
_CASTS = (_ATEN.to.dtype, _ATEN.to.dtype_layout, _ATEN._to_copy.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """An RMSNorm whose result only the linear reads: ``x * rsqrt(mean(x²) + eps) * weight``."""

    source: Node
    weight: Node
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvSite:
    """One linear on few rows; a call there computes ``result``."""

    linear: Node
    result: Node
    """The last op that is replaced: the linear, the product with the gate, or the sum with the residual."""
    rows: int
    columns: int
    """Of the result: half of the linear's where it is gated."""
    inner: int
    norm: Norm | None = None
    is_gated: bool = False
    """``silu(first half) * second half`` of the linear's output."""
    residual: Node | None = None

    @property
    def operands(self) -> tuple[Node, ...]:
        """What a call is given, in order: x, the norm's weight, weight, bias, residual, less those that the site lacks."""
        source = (self.linear.args[0],) if self.norm is None else (self.norm.source, self.norm.weight)
        found = (*source, *self.linear.args[1:], self.residual)
        return tuple(operand for operand in found if isinstance(operand, Node))


MakeCall = Callable[[GemvSite], Callable[..., torch.Tensor] | None]
"""Gives the call for a site, or None where no kernel of ours is faster."""


def find_gemv_sites(graph: Graph) -> list[GemvSite]:
    """Return the linears on at most 64 rows, each with as much of its surroundings as one kernel can take in."""
    return [site for node in graph.nodes if node.target is _LINEAR and (site := _site(node)) is not None]


def replace_gemvs(graph: Graph, make: MakeCall) -> int:
    """Write calls in place of the sites that ``make`` has one for; returns how many.

    Args:
        graph: rewritten in place; what nothing reads any more is left for dead code elimination.
        make: called once per site.
    """
    changed = 0
    for site in find_gemv_sites(graph):
        call = make(site)
        if call is None:
            continue
        with graph.inserting_before(site.result):
            node = graph.call_function(call, site.operands)
        node.meta = dict(site.result.meta)
        site.result.replace_all_uses_with(node)
        changed += 1
    return changed


def _site(linear: Node) -> GemvSite | None:
    source, weight, out = linear.args[0], linear.args[1], linear.meta["val"]
    assert isinstance(source, Node) and isinstance(weight, Node)
    inner = weight.meta["val"].shape[1]
    rows = source.meta["val"].numel() // max(inner, 1)
    if rows > MOST_ROWS or not weight.meta["val"].is_contiguous():
        return None
    columns = out.shape[-1]
    gate = _gate(linear)
    if gate is not None and _is_written_between(linear, gate):
        gate = None
    result, residual = gate or linear, None
    found = _residual(result)
    if found is not None and not _is_written_between(linear, found[0]):
        result, residual = found
    norm = _norm(source) if len(source.users) == 1 else None
    if norm is not None and _is_written_between(norm.source, result):
        norm = None
    return GemvSite(
        linear=linear,
        result=result,
        rows=rows,
        columns=columns // 2 if gate else columns,
        inner=inner,
        norm=norm,
        is_gated=gate is not None,
        residual=residual,
    )


def _norm(node: Node) -> Norm | None:
    """Read ``weight * (x * rsqrt(mean(x ** 2, -1) + eps))`` backwards, with or without casts, or torch's own op."""
    if node.target is _ATEN.rms_norm.default and len(node.args) > 2:
        source, _, weight = node.args[:3]
        eps = node.args[3] if len(node.args) > 3 else None
        if isinstance(source, Node) and isinstance(weight, Node) and weight.meta["val"].dim() == 1 and isinstance(eps, float):
            return Norm(source=source, weight=weight, eps=eps)
        return None
    for weight, scaled in _factors(node):
        if weight.meta["val"].dim() != 1:
            continue
        for source, root in _factors(_uncast(scaled)):
            eps = _eps(root, source)
            if eps is not None:
                return Norm(source=_uncast(source), weight=weight, eps=eps)
    return None


def _eps(root: Node, source: Node) -> float | None:
    if root.target is not _ATEN.rsqrt.default:
        return None
    added = root.args[0]
    if not isinstance(added, Node) or added.target is not _ATEN.add.Tensor or not isinstance(added.args[1], float):
        return None
    mean = added.args[0]
    if not isinstance(mean, Node) or mean.target is not _ATEN.mean.dim or mean.args[1:3] != ([-1], True):
        return None
    square = mean.args[0]
    is_square = isinstance(square, Node) and square.target is _ATEN.pow.Tensor_Scalar and square.args == (source, 2)
    return added.args[1] if is_square else None


def _factors(node: Any) -> list[tuple[Node, Node]]:
    if not isinstance(node, Node) or node.target is not _ATEN.mul.Tensor:
        return []
    left, right = node.args[:2]
    return [(left, right), (right, left)] if isinstance(left, Node) and isinstance(right, Node) else []


def _uncast(node: Node) -> Node:
    source = node.args[0] if node.target in _CASTS else node
    return source if isinstance(source, Node) else node


def _gate(linear: Node) -> Node | None:
    """Return ``silu(first half) * second half`` where nothing else reads the halves."""
    halves = list(linear.users)
    width = linear.meta["val"].shape[-1]
    if len(halves) != 2 or width % 2 or any(node.target is not _ATEN.slice.Tensor for node in halves):
        return None
    spans = {node.args[1:4]: node for node in halves}
    first, second = spans.get((-1, 0, width // 2)), spans.get((-1, width // 2, width))
    if first is None or second is None or len(first.users) != 1 or len(second.users) != 1:
        return None
    silu, product = next(iter(first.users)), next(iter(second.users))
    is_gate = silu.target is _ATEN.silu.default and product.target is _ATEN.mul.Tensor
    return product if is_gate and list(silu.users) == [product] else None


def _residual(node: Node) -> tuple[Node, Node] | None:
    """Return the sum that alone reads a node, and what is added."""
    if len(node.users) != 1:
        return None
    total = next(iter(node.users))
    if total.target is not _ATEN.add.Tensor or total.kwargs:
        return None
    other = next((source for source in total.args[:2] if source is not node), None)
    if not isinstance(other, Node):
        return None
    shapes = {tuple(value.meta["val"].shape) for value in (node, other, total)}
    dtypes = {value.meta["val"].dtype for value in (node, other, total)}
    return (total, other) if len(shapes) == len(dtypes) == 1 else None


def _is_written_between(first: Node, last: Node) -> bool:
    """Whether anything is written to between two nodes: then what is read at the first might not be the same at the last."""
    at = first.next
    while at is not last:
        if written_storages(at):
            return True
        at = at.next
    return False
