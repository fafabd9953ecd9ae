"""Very large chains compared with fp64 some rows at a time: the original ops run on these rows alone.

In fp64 a chain's operands and what its ops hold take eight to ten times their own bytes. The gradient of GPT-2's loss reads and
writes 3.3 GB each (32,768 rows of 50,257 words, bf16), and beside a training step no GPU had 60 GB left. The kernel still runs
once on all rows. Its results are compared part after part, all of them, and each part keeps to the limit by its own errors.

That is right where rows are independent. Each op says which of its operands have rows, from the results backwards. With an op
that is not known to keep rows apart, or a value that would have to be both, the chain is compared at once.

On a CPU the check of that gradient at 1,024 rows took 1.0 GB in eight parts and 3.4 GB at once, where the result has 0.1 GB.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fusion_advisor.records import TensorMeta

LARGE = 1 << 27
"""Elements of a chain's largest value up to which it is compared at once: 1 GB for each value in fp64."""
MOST = 1 << 25
"""Elements of a part, which one block may exceed."""

_ATEN = torch.ops.aten
_VIEWS = (_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default)
_EXPAND = _ATEN.expand.default
_SOFTMAX = (
    _ATEN._softmax.default, _ATEN._log_softmax.default, _ATEN._safe_softmax.default, _ATEN.softmax.int, _ATEN.log_softmax.int,
)  # fmt: skip
_SOFTMAX_GRADIENT = (_ATEN._log_softmax_backward_data.default, _ATEN._softmax_backward_data.default)
_SUMS = (_ATEN.sum.dim_IntList, _ATEN.mean.dim, _ATEN.amax.default, _ATEN.amin.default)
_SAME = (_ATEN._to_copy.default, _ATEN.clone.default, _ATEN.alias.default, _ATEN.detach.default, _ATEN.to.dtype)
_OF_ONE_DIM = (_ATEN.slice.Tensor, _ATEN.select.int, _ATEN.squeeze.dim)
_NONE = 0
"""ATen's number of a loss that is not reduced."""

_Needs = dict[Node, bool]
"""Whether each operand of an op has rows."""


@dataclass(frozen=True, slots=True)
class RowPart:
    """Some rows of a chain.

    Attributes:
        with_rows: the values that have rows: operands, ops and results.
        blocks: into how many equal blocks of rows each of them can be cut.
        first: block of the part.
        last: the block behind it.
    """

    with_rows: frozenset[Node]
    blocks: int
    first: int
    last: int

    def cut(self, node: Node, value: torch.Tensor) -> torch.Tensor:
        """Return the part's rows of a value, all of it where it has none."""
        if node not in self.with_rows:
            return value
        rows = len(value) // self.blocks
        return value[self.first * rows : self.last * rows]

    def arguments(self, node: Node) -> tuple[Any, ...]:
        """Return an op's arguments; where they name the number of rows, that of the part."""
        if node not in self.with_rows or (node.target not in _VIEWS and node.target is not _EXPAND):
            return node.args
        source, sizes, *more = node.args
        assert isinstance(sizes, Sequence)
        rows = sizes[0]
        if not isinstance(rows, int) or rows < 0:
            return node.args
        return source, [rows // self.blocks * (self.last - self.first), *sizes[1:]], *more


def row_parts(
    nodes: Sequence[Node], outer: Sequence[tuple[Node, int, TensorMeta, TensorMeta]], outputs: Sequence[Node],
    *, large: int, most: int,
) -> tuple[RowPart, ...]:  # fmt: skip
    """Cut a very large chain into parts of its rows; empty where it is not so large, or where its rows are not independent.

    Args:
        nodes: its ops, in order.
        outer: values read from outside, each as (node, root operand number, layout, the root's layout).
        outputs: its results.
        large: elements of its largest value from which on it is cut.
        most: elements of a part's largest value.
    """
    shapes = {node: meta.shape for node, _, meta, _ in outer} | {
        node: tuple(value.shape) for node in nodes if isinstance(value := node.meta.get("val"), torch.Tensor)
    }
    if not set(nodes) <= shapes.keys() or max(map(math.prod, shapes.values())) < large:
        return ()
    with_rows = _with_rows(nodes, outputs, shapes)
    if with_rows is None:
        return ()
    blocks = functools.reduce(math.gcd, (shapes[node][0] for node in with_rows))
    if blocks < 2:
        return ()
    step = max(1, most * blocks // max(math.prod(shapes[node]) for node in with_rows))
    return tuple(RowPart(with_rows, blocks, first, min(first + step, blocks)) for first in range(0, blocks, step))


def _with_rows(nodes: Sequence[Node], outputs: Collection[Node], shapes: Mapping[Node, Sequence[int]]) -> frozenset[Node] | None:
    """Return the values that have rows where all results do; None where some op mixes rows."""
    if any(not shapes[node] for node in outputs):
        return None
    known: _Needs = dict.fromkeys(outputs, True)
    for node in reversed(nodes):
        has_rows = known.setdefault(node, False)
        needs = _needs(node, shapes) if has_rows else dict.fromkeys(node.all_input_nodes, False)
        if needs is None or not needs.keys() >= set(node.all_input_nodes):
            return None
        if any(known.setdefault(source, need) is not need for source, need in needs.items()):
            return None
    return frozenset(node for node, has_rows in known.items() if has_rows)


def _needs(node: Node, shapes: Mapping[Node, Sequence[int]]) -> _Needs | None:
    """Say which operands of an op have rows where its result does; None where the op is not known to keep rows apart."""
    target, args, keywords = node.target, node.args, node.kwargs
    own = shapes[node]
    if target in _VIEWS or target in _SAME:
        return _first_has_rows(node)
    if target is _EXPAND or torch.Tag.pointwise in getattr(target, "tags", ()):
        return None if _draws(node) else {source: _is_aligned(shapes[source], own) for source in node.all_input_nodes}
    if target in _SOFTMAX or target in _SOFTMAX_GRADIENT:
        (dim,) = (one for one in args[1:] if type(one) is int) if target in _SOFTMAX_GRADIENT else args[1:2]
        return dict.fromkeys(node.all_input_nodes, True) if _is_inside(dim, len(own)) else None
    if target in _SUMS:
        dims, rank = args[1] if len(args) > 1 else keywords.get("dim"), len(shapes[node.all_input_nodes[0]])
        return _first_has_rows(node) if dims and all(_is_inside(one, rank) for one in _listed(dims)) else None
    if target in _OF_ONE_DIM:
        dim = args[1] if len(args) > 1 else 0
        return _first_has_rows(node) if _is_inside(dim, len(shapes[node.all_input_nodes[0]])) else None
    if target is _ATEN.unsqueeze.default:
        return _first_has_rows(node) if _is_inside(args[1], len(own)) else None
    if target is _ATEN.constant_pad_nd.default:
        return _first_has_rows(node) if len(_listed(args[1])) < 2 * len(own) else None
    return _needs_of_loss(node)


def _needs_of_loss(node: Node) -> _Needs | None:
    """Of a loss of each row, and of the gradient of any loss: its rows come together in numbers that it is given."""
    args: tuple[Any, ...] = node.args
    if node.target is _ATEN.nll_loss.default and len(args) > 3 and args[3] == _NONE:
        source, target, weight = args[:3]
        found = {source: True, target: True, weight: False}
    elif node.target is _ATEN.nll_loss_backward.default:
        gradient, source, target, weight, reduction, _, total = args
        found = {gradient: reduction == _NONE, source: True, target: True, weight: False, total: False}
    else:
        return None
    return {one: need for one, need in found.items() if isinstance(one, Node)}


def _first_has_rows(node: Node) -> _Needs | None:
    return {node.args[0]: True} if isinstance(node.args[0], Node) else None


def _is_aligned(shape: Sequence[int], own: Sequence[int]) -> bool:
    """Whether an operand's first dim is that of the result, and not repeated."""
    return len(shape) == len(own) and shape[0] == own[0] and own[0] > 1


def _is_inside(dim: Any, rank: int) -> bool:
    """Whether a dim is another than the first."""
    return isinstance(dim, int) and operator.mod(dim, rank) != 0


def _listed(dims: Any) -> Sequence[Any]:
    return dims if isinstance(dims, Sequence) else [dims]


def _draws(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
