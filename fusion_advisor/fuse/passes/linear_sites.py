"""Linears with the norm before and the gate or residual after them: where one kernel of ours could stand.

At up to 64 rows a linear's time is that of reading its weight, and every small kernel around it is a launch of its own. On more
rows cuBLAS is at the limit, but a gate reads what it has written: there a linear and its gate alone are such a place. This finds
them in a graph; which kernel is written into them, and whether one pays, ``fuse.stages.try_linear_kernels`` decides. It looks at
graphs whose GEMMs were merged: a gate and its up projection are one linear then, and a norm that fed three linears feeds one.

A decoder layer is four such places: norm → q/k/v, attention's output → + residual, norm → gate and up → silu · mul, and
down → + residual. What ends one is what the next begins with, so the residual stream is all that lies between them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion_advisor.capture.graph.fx_nodes import first_reader, is_written_between
from fusion_advisor.fuse.rewrite.record import KernelRewrite

MOST_ROWS = 64
"""Above, a GEMM is no longer bound by its weight, and only one with its gate is better than cuBLAS (measured on an H200)."""

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
    """One linear; a call there computes ``result``."""

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

    @property
    def has_bias(self) -> bool:
        """Whether the linear adds one."""
        return len(self.linear.args) > 2 and self.linear.args[2] is not None

    @property
    def members(self) -> tuple[Node, ...]:
        """The ops between the operands and the result that nothing else reads, the result last: what a call replaces."""
        found, outside, waiting = {self.result}, set(self.operands), [self.result]
        while waiting:
            for node in waiting.pop().all_input_nodes:
                is_inside = node.op == "call_function" and node not in outside and node not in found
                if is_inside and all(user in found for user in node.users):
                    found.add(node)
                    waiting.append(node)
        # In the graph's order, which is not walked further than the site reaches: a model has hundreds of sites.
        ordered, at = [self.result], self.result
        while len(ordered) < len(found):
            at = at.prev
            if at in found:
                ordered.append(at)
        return tuple(reversed(ordered))


def find_gemv_sites(graph: Graph) -> list[GemvSite]:
    """Return the linears on at most 64 rows, each with all around it that one kernel takes in, and gated ones on more."""
    found: dict[Node, GemvSite] = {}
    for node in graph.nodes:
        site = _site(node, found) if node.target is _LINEAR else None
        if site is not None:
            found[site.result] = site
    return list(found.values())


def _site(linear: Node, taken: Collection[Node]) -> GemvSite | None:
    source, weight, out = linear.args[0], linear.args[1], linear.meta["val"]
    assert isinstance(source, Node) and isinstance(weight, Node)
    inner = weight.meta["val"].shape[1]
    rows = source.meta["val"].numel() // max(inner, 1)
    if not weight.meta["val"].is_contiguous():
        return None
    columns = out.shape[-1]
    gate = _gate(linear)
    is_gate_alone = rows > MOST_ROWS
    if is_gate_alone and gate is None:
        return None
    result, residual = gate or linear, None
    found = None if is_gate_alone else _residual(result)
    # The sum of two linears is computed by one of them.
    if found is not None and found[0] not in taken and not is_written_between(found[1:], linear, first_reader(found[0])):
        result, residual = found
    end = first_reader(result)
    if is_written_between(linear.all_input_nodes, linear, end):
        return None
    norm = None if is_gate_alone else _norm(_before_views(source))
    if norm is not None and is_written_between((norm.source, norm.weight), norm.source, end):
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


def _before_views(node: Node) -> Node:
    """Return what lies before slices of everything (a head's "last positions" where there is one) that nothing else reads.

    Torch 2.13 traces such a slice as an ``alias``.
    """
    while node.target in (_ATEN.slice.Tensor, _ATEN.alias.default) and isinstance(source := node.args[0], Node):
        if len(source.users) != 1:
            break
        if source.meta["val"].shape != node.meta["val"].shape or len(node.users) != 1:
            break
        node = source
    return node


def _norm(node: Node) -> Norm | None:
    """Read ``weight * (x * rsqrt(mean(x ** 2, -1) + eps))`` backwards, with or without casts, or torch's own op."""
    if len(node.users) != 1:
        return None
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
    first, second = _halves(linear)
    if first is None or second is None or len(first.users) != 1 or len(second.users) != 1:
        return None
    silu, product = next(iter(first.users)), next(iter(second.users))
    is_gate = silu.target is _ATEN.silu.default and product.target is _ATEN.mul.Tensor
    return product if is_gate and list(silu.users) == [product] else None


def _halves(linear: Node) -> tuple[Node | None, Node | None]:
    """Return the halves that a linear's output is read in: slices, as merging makes them, or a chunk's."""
    width, readers = linear.meta["val"].shape[-1], list(linear.users)
    is_chunk = len(readers) == 1 and readers[0].target is _ATEN.chunk.default
    if is_chunk and readers[0].args[1:] in ((2, -1), (2, linear.meta["val"].dim() - 1)):
        items = {node.args[1]: node for node in readers[0].users if node.target is operator.getitem}
        return (items.get(0), items.get(1)) if width % 2 == 0 and len(items) == len(readers[0].users) == 2 else (None, None)
    if len(readers) != 2 or width % 2 or any(node.target is not _ATEN.slice.Tensor for node in readers):
        return None, None
    spans = {node.args[1:4]: node for node in readers}
    return spans.get((-1, 0, width // 2)), spans.get((-1, width // 2, width))


def _residual(node: Node) -> tuple[Node, Node] | None:
    """Return the sum that alone reads a node (through a dropout of inference or not), and what is added."""
    if len(node.users) != 1:
        return None
    total = next(iter(node.users))
    if total.target is _ATEN.dropout.default and not total.args[2]:
        return _residual(total)
    if total.target is not _ATEN.add.Tensor or total.kwargs:
        return None
    other = next((source for source in total.args[:2] if source is not node), None)
    if not isinstance(other, Node):
        return None
    shapes = {tuple(value.meta["val"].shape) for value in (node, other, total)}
    dtypes = {value.meta["val"].dtype for value in (node, other, total)}
    return (total, other) if len(shapes) == len(dtypes) == 1 else None


LINEAR_KERNELS = KernelRewrite(
    id="linear-kernels",
    title="linear-layer kernels",
    find=find_gemv_sites,
    after={
        "merge-gemms": "a gate and its up projection are one linear then, and one kernel computes both",
        "gemm-epilogue": "a kernel must be faster than the library's GEMM with its epilogue",
        "all-reduce-norm": "the norm after a sum over ranks is computed with the sum",
    },
)
