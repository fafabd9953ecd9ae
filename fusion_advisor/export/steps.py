"""A rewritten graph as a list of steps, one for each statement of the printed forward, and the layers that they belong to."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from fusion_advisor.capture.graph.fx_nodes import is_idle_dropout, module_path
from fusion_advisor.export.kernel_ops import KernelOp, KernelOps
from fusion_advisor.export.parameters import Layer, is_joined_operand, layer_of
from fusion_advisor.fuse.cuda_graph.tail import LastProduct

_FEWEST_STEPS = 5
"""A layer of fewer steps that no other layer is equal to stays where it is called."""


@dataclass(frozen=True, slots=True)
class Step:
    """One statement.

    Attributes:
        node: the call.
        results: what gets a name: the call itself, or each of its results; None for one that nobody reads.
        is_unpacked: whether the call returns several.
        reads: what it reads, each once, in order.
        layer: that it belongs to.
    """

    node: Node
    results: tuple[Node | None, ...]
    is_unpacked: bool
    reads: tuple[Node, ...]
    layer: Layer | None


@dataclass(frozen=True, slots=True)
class Section:
    """Steps in a row of one layer, or of none.

    Attributes:
        given: values of earlier sections that it reads, in the order of their first use.
        outputs: values that later sections or the result read, in the order in which they are made.
    """

    layer: Layer | None
    steps: tuple[Step, ...]
    given: tuple[Node, ...]
    outputs: tuple[Node, ...]


class Steps:
    """The steps of a graph.

    Attributes:
        steps: in order, without those of the last product.
        late: the last product and the views of it, where it is a function of its own.
        returned: what the graph returns; of the last product what it reads.
    """

    def __init__(self, graph: Graph, ops: KernelOps, late: LastProduct | None = None) -> None:
        """Read a graph.

        Args:
            graph: rewritten.
            ops: the kernels in it.
            late: its last product, which is a function of its own.
        """
        self._late = late
        self.late: list[Step] = []
        self._same: dict[Node, Node] = {}
        self._unpacked: set[Node] = set()
        self._ops = ops
        self.steps: list[Step] = []
        self.returned: list[Node] = []
        self._read(graph)
        self.readers: dict[Node, list[int]] = {}
        """For each value the places of the steps that read it."""
        for place, step in enumerate(self.steps):
            for node in step.reads:
                self.readers.setdefault(node, []).append(place)

    def same(self, node: Node) -> Node:
        """Return the value that a node is, where it only passes one on."""
        while node in self._same:
            node = self._same[node]
        return node

    def _read(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.op == "output":
                self.returned = [self.same(one) for one in node.all_input_nodes]
                if self._late is not None:
                    self.returned = [one for one in self.returned if one is not self._late.ops[-1]] + [self._late.hidden]
            if node.op != "call_function" or node in self._same or node in self._unpacked:
                continue
            if is_joined_operand(node.target):  # read like a parameter
                continue
            if is_idle_dropout(node):
                self._same[node] = node.all_input_nodes[0]
                continue
            results = self._results(node)
            reads = tuple(dict.fromkeys(self.same(one) for one in node.all_input_nodes))
            shown = (node,) if results is None else results
            op = self._ops.of(node.target)
            is_plain = results is None or (op is not None and bool(op.in_place) and len(results) < 2)
            is_late = self._late is not None and node in self._late.ops
            step = Step(node, shown, not is_plain, reads, None if is_late else layer_of(module_path(node)))
            (self.late if is_late else self.steps).append(step)

    def _results(self, node: Node) -> tuple[Node | None, ...] | None:
        """Return what a call's results are called, where it has several and nothing reads them but by number."""
        op, value = self._ops.of(node.target), node.meta.get("val")
        if op is not None and op.in_place:
            return self._fresh(node, op)
        count = len(op.outputs) if op else len(value) if isinstance(value, list | tuple) else 1
        users = list(node.users)
        if (op and count == 1) or not users or not isinstance(value, list | tuple | None) or count > 8:
            return None
        if not all(user.target is operator.getitem and isinstance(user.args[1], int) and user.args[1] >= 0 for user in users):
            return None
        found: list[Node | None] = [None] * count
        for user in users:
            place = user.args[1]
            assert isinstance(place, int)
            first = found[place]
            if first is None:
                found[place] = user
            else:
                self._same[user] = first
        self._unpacked.update(users)
        return tuple(found)

    def _fresh(self, node: Node, op: KernelOp) -> tuple[Node | None, ...] | None:
        """Return the results that a kernel allocates; the others are the tensors that it was given and wrote into."""
        targets = dict(zip(op.in_place, node.args[-len(op.in_place) :], strict=True))
        fresh = [place for place in range(len(op.outputs)) if place not in op.in_place]
        if len(op.outputs) == 1:
            self._same[node] = _as_node(targets[0])
            return ()
        found: list[Node | None] = [None] * len(fresh)
        for user in node.users:
            place = user.args[1]
            assert user.target is operator.getitem
            assert isinstance(place, int)
            first = None if place in targets else found[fresh.index(place)]
            if place in targets:
                self._same[user] = _as_node(targets[place])
            elif first is None:
                found[fresh.index(place)] = user
            else:
                self._same[user] = first
        self._unpacked.update(node.users)
        return tuple(found)

    def sections(self) -> list[Section]:
        """Return the steps in sections: one for each layer's steps in a row, and those between them."""
        groups: list[list[Step]] = []
        for step in self.steps:
            if groups and groups[-1][0].layer == step.layer:
                groups[-1].append(step)
            else:
                groups.append([step])
        made_in = {node: number for number, group in enumerate(groups) for step in group for node in step.results if node}
        used_later: dict[Node, bool] = dict.fromkeys(self.returned, True)
        for number, group in enumerate(groups):
            for step in group:
                for node in step.reads:
                    if made_in.get(node, number) != number:
                        used_later[node] = True
        found = []
        for number, group in enumerate(groups):
            reads = dict.fromkeys(node for step in group for node in step.reads if made_in.get(node, -1) not in (number, -1))
            outputs = [node for step in group for node in step.results if node is not None and node in used_later]
            found.append(Section(group[0].layer, tuple(group), tuple(reads), tuple(outputs)))
        return found


def _as_node(argument: object) -> Node:
    assert isinstance(argument, Node)
    return argument


def is_worth_a_function(section: Section, equal: Sequence[Section]) -> bool:
    """Whether a section is printed as a function.

    Args:
        section: of a layer.
        equal: all sections that it is equal to, itself among them.
    """
    count = len(section.steps)
    return section.layer is not None and (count >= _FEWEST_STEPS or (count > 1 and len(equal) > 1))


def carried(run: Sequence[Section]) -> Mapping[int, int] | None:
    """Return which output of a layer is which given value of the next one, where a loop over these layers computes the same.

    Args:
        run: equal sections in a row.

    Returns:
        output by the place of the given value; None where no loop does.
    """
    first, second = run[0], run[1]
    assert first.layer is not None
    moved = {place: first.outputs.index(node) for place, node in enumerate(second.given) if node in first.outputs}
    if sorted(moved.values()) != list(range(len(first.outputs))):
        return None
    for number, (before, after) in enumerate(itertools.pairwise(run), start=1):
        assert after.layer is not None
        if after.layer != Layer(first.layer.container, first.layer.number + number):
            return None
        for place, node in enumerate(after.given):
            if node is not (before.outputs[moved[place]] if place in moved else first.given[place]):
                return None
    return moved
