"""One step of an unrolled loop, once it is proven that all steps are this one.

A step's ops are compared with those of the second step, op by op, from its state and its row backwards. They may differ in
integers alone, and each of these must grow by the same amount from step to step (``a[:, 0]``, ``a[:, 1]``, …). A loop of which
that does not hold has a reason instead of a step.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fusion_advisor.capture.graph.fx_nodes import tensors_of
from fusion_advisor.capture.loops.one_op import UnrolledLoop

_aten = torch.ops.aten
_CASTS = frozenset({_aten.to.dtype, _aten._to_copy.default, _aten.type_as.default})
_PRODUCTS = frozenset({_aten.matmul.default, _aten.bmm.default})
_PARTS = frozenset({_aten.unbind.int, _aten.split.Tensor, _aten.chunk.default, _aten.split_with_sizes.default})
_HALVES = (torch.float16, torch.bfloat16)


class NoStep(Exception):
    """A loop whose steps are not all alike, or not what a kernel takes; the text says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStep:
    """The second step of a loop, which stands for all.

    Attributes:
        loop: the loop.
        before: what the first step has in place of a state before it.
        rows: what the loop gathers, one for each step.
        along: the dim of the loop's first output along which the rows lie.
        growth: for each op of the second step, how much each of its arguments' leaves grows by from step to step.
    """

    loop: UnrolledLoop
    before: Node
    rows: tuple[Node, ...]
    along: int
    growth: Mapping[Node, tuple[int, ...]]

    @property
    def count(self) -> int:
        """How many steps there are."""
        return len(self.loop.states)

    def write(self, graph: Graph, given: Mapping[Node, Node], state: Node, number: int) -> tuple[Node, Node]:
        """Add the ops of a step to a graph, with matrix products as sums.

        Args:
            graph: gets the ops, with their values in ``meta``.
            given: what stands in the graph for each input of the loop.
            state: what stands there for the state before.
            number: of the step.

        Returns:
            The step's state and its row.

        Raises:
            NoStep: the step reads the state of a step that is not the one before.
        """
        copies = dict(given)
        copies[self.loop.states[0]] = state
        others = set(self.loop.states[2:])

        def copy(node: Node) -> Node:
            if node in others:
                raise NoStep("a step reads another state than that of the step before")
            if node not in copies:
                arguments = tuple(map(copy, _tensors_before(node)))
                copies[node] = _copied(graph, node, arguments, self.growth.get(node), number - 1)
            return copies[node]

        return copy(self.loop.states[1]), copy(self.rows[1])


def one_step(loop: UnrolledLoop) -> OneStep:
    """Return the step that a loop repeats.

    Raises:
        NoStep: its steps are not alike.
    """
    gather, count = loop.gather, len(loop.states)
    rows = gather.args[0]
    if count < 3 or not isinstance(rows, list | tuple) or len(rows) != count or not all(isinstance(row, Node) for row in rows):
        raise NoStep("it does not gather one row of each step")
    nodes = [row for row in rows if isinstance(row, Node)]
    sizes = {tuple(row.meta["val"].shape) for row in nodes}
    given = gather.args[1] if len(gather.args) > 1 else gather.kwargs.get("dim", 0)
    along = given if isinstance(given, int) else 0
    along %= gather.meta["val"].dim()
    if len(sizes) != 1 or (gather.target is _aten.cat.default and next(iter(sizes))[along] != 1):
        raise NoStep("the rows that it gathers are of several sizes")
    compare = _Compare(loop, nodes)
    for number in range(count):
        compare.step(number)
    if compare.before is None:
        raise NoStep("its first step reads no state")
    return OneStep(loop=loop, before=compare.before, rows=tuple(nodes), along=along, growth=compare.growth())


class _Compare:
    """Compares steps with the second one.

    Attributes:
        before: what the first step has in place of a state.
    """

    def __init__(self, loop: UnrolledLoop, rows: Sequence[Node]) -> None:
        self.before: Node | None = None
        self._states, self._rows = loop.states, rows
        self._of_states = set(loop.states)
        """What is made of some state."""
        for node in loop.graph.nodes:
            if not self._of_states.isdisjoint(node.all_input_nodes):
                self._of_states.add(node)
        self._leaves: dict[Node, list[list[Any]]] = {}

    def step(self, number: int) -> None:
        pairs: dict[Node, Node] = {}
        waiting = [(self._states[number], self._states[1]), (self._rows[number], self._rows[1])]
        while waiting:
            node, like = waiting.pop()
            if like in pairs:
                if pairs[like] is not node:
                    raise NoStep(f"step {number} reads two values where step 1 reads one")
                continue
            pairs[like] = node
            if self._is_state_before(node, like, number):
                continue
            if like is self._states[1] and node is not self._states[number]:
                raise NoStep(f"step {number} reads another state than its own")
            if node is like:
                if number != 1 and node in self._of_states:
                    raise NoStep(f"step {number} reads what step 1 makes of a state")
                self._leaves.setdefault(like, [])
                continue
            self._see(node, like, number)
            waiting += zip(_tensors_before(node), _tensors_before(like), strict=True)

    def _is_state_before(self, node: Node, like: Node, number: int) -> bool:
        first = self._states[0]
        if number == 0 and _uncast(like) is first and like is not self._states[1]:
            # Rounded to the dtype that it has, a value stays as it is.
            is_rounded = like is not first and node.meta["val"].dtype != like.meta["val"].dtype
            if is_rounded or self.before not in (None, node):
                raise NoStep("its first step does not read one state as the others do")
            self.before = node
            return True
        if like is not first:
            return False
        if node is not self._states[number - 1]:
            raise NoStep(f"step {number} reads another state than that of the step before")
        return True

    def _see(self, node: Node, like: Node, number: int) -> None:
        if node.op != "call_function" or node.target != like.target or _layouts(node) != _layouts(like):
            raise NoStep(f"step {number} has {node.target} where step 1 has {like.target}")
        leaves, tree = pytree.tree_flatten((node.args, node.kwargs))
        others, other_tree = pytree.tree_flatten((like.args, like.kwargs))
        same = len(leaves) == len(others) and tree == other_tree
        if not same or not all(_fits(one, other) for one, other in zip(leaves, others, strict=True)):
            raise NoStep(f"step {number} calls {node.target} with other arguments than step 1")
        self._leaves.setdefault(like, []).append([number, *leaves])

    def growth(self) -> dict[Node, tuple[int, ...]]:
        """Return how each op's integers grow.

        Raises:
            NoStep: some integer does not grow evenly.
        """
        found: dict[Node, tuple[int, ...]] = {}
        for node, seen in self._leaves.items():
            mine, _ = pytree.tree_flatten((node.args, node.kwargs))
            grows = [0] * len(mine)
            for place, leaf in enumerate(mine):
                if type(leaf) is not int:
                    continue
                grows[place] = next((leaves[1 + place] - leaf for leaves in seen if leaves[0] == 2), 0)
                if any(leaves[1 + place] != leaf + (leaves[0] - 1) * grows[place] for leaves in seen):
                    raise NoStep(f"the integers that {node.target} is given do not grow evenly from step to step")
            found[node] = tuple(grows)
        return found


def _fits(one: Any, other: Any) -> bool:
    if isinstance(one, Node) or isinstance(other, Node):
        return isinstance(one, Node) and isinstance(other, Node)
    return type(one) is type(other) and (type(one) is int or one == other)


def _layouts(node: Node) -> object:
    return tuple((tuple(value.shape), value.dtype, value.device) for value in tensors_of(node.meta.get("val")))


def _tensors_before(node: Node) -> list[Node]:
    """Return the nodes among an op's arguments, each as often as it stands there."""
    leaves, _ = pytree.tree_flatten((node.args, node.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Node)]


def _uncast(node: Node) -> Node:
    while node.target in _CASTS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _copied(graph: Graph, node: Node, sources: Sequence[Node], growth: tuple[int, ...] | None, steps: int) -> Node:
    """Add a step's op to a graph, its integers moved on by some steps."""
    leaves, tree = pytree.tree_flatten((node.args, node.kwargs))
    left = iter(sources)
    moved = [
        next(left) if isinstance(leaf, Node) else leaf + steps * grows if grows else leaf
        for leaf, grows in zip(leaves, growth or (0,) * len(leaves), strict=True)
    ]
    args, kwargs = pytree.tree_unflatten(moved, tree)
    if node.target in _PARTS:  # asked for its parts below
        made = graph.call_function(node.target, args, kwargs)
        made.meta["val"] = node.meta["val"]
        return made
    if node.target is operator.getitem and isinstance(args[0], Node) and args[0].target in _PARTS:
        return _part(graph, args[0], args[1])
    if node.target in _PRODUCTS:
        return _summed(graph, *args)
    return add_op(graph, node.target, args, kwargs)


def add_op(graph: Graph, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Node:
    """Add an op to a graph, with the value that it has for its arguments' values."""
    made = graph.call_function(target, args, dict(kwargs or {}))
    values = torch.fx.node.map_arg((args, dict(kwargs or {})), lambda source: source.meta["val"])
    made.meta["val"] = target(*values[0], **values[1])
    return made


def _part(graph: Graph, parts: Node, number: int) -> Node:
    """Add the view that a list of views holds at some place."""
    source, dim = parts.args[0], 0
    assert isinstance(source, Node)
    at = 1 if parts.target is _aten.unbind.int else 2
    given = parts.args[at] if len(parts.args) > at else parts.kwargs.get("dim", 0)
    dim = given if isinstance(given, int) else 0
    if parts.target is _aten.unbind.int:
        return add_op(graph, _aten.select.int, (source, dim, number))
    sizes = [value.shape[dim] for value in parts.meta["val"]]
    start = sum(sizes[:number])
    return add_op(graph, _aten.slice.Tensor, (source, dim, start, start + sizes[number]))


def _summed(graph: Graph, left: Node, right: Node) -> Node:
    """Add a product with a vector as a sum of products in float32, as a GEMM of 16 bits adds up.

    Raises:
        NoStep: it is a product of two matrices.
    """
    one, other = left.meta["val"], right.meta["val"]
    dtype = one.dtype
    if other.dim() == 1:
        dim, keep = -1, False
    elif one.dim() > 1 and other.shape[-1] == 1:
        right, dim, keep = add_op(graph, _aten.transpose.int, (right, -1, -2)), -1, True
    elif one.dim() > 1 and one.shape[-2] == 1:
        left, dim, keep = add_op(graph, _aten.transpose.int, (left, -1, -2)), -2, True
    else:
        raise NoStep("a step multiplies two matrices")
    if dtype in _HALVES:
        left, right = (add_op(graph, _aten.to.dtype, (side, torch.float32)) for side in (left, right))
    total = add_op(graph, _aten.sum.dim_IntList, (add_op(graph, _aten.mul.Tensor, (left, right)), [dim], keep))
    return add_op(graph, _aten.to.dtype, (total, dtype)) if dtype in _HALVES else total
