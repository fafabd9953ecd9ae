"""Splits a region into segments whose sizes do not depend on a size that grows, and the ops in between that do.

The cache of a decode step grows by one token at each step, so a CUDA graph of the whole step would serve one step. But norms,
projections, rotary embeddings and MLPs of the new token have the same sizes at every step: only the concatenation with the
cache, masks and attention do not. Each op gets a level: an op of fixed sizes that reads what depends on the growing size comes
one level after it. The fixed ops of one level are a segment. So the order of ops changes, which no result sees: a region that
writes to anything, draws numbers or meets other processes is not split. Figures: ``docs/measurements/ranges.md``.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.capture.graph.fx_nodes import ATTENTION, FLASH_ATTENTION, draws_numbers, tensors_of, written_storages
from fusion_advisor.fuse.cuda_graph.capturable import has_collectives, host_work
from fusion_advisor.fuse.rewrite.derived_tensors import is_derived
from fusion_advisor.runtime.torch_internals import fx_trace, symbolic_sizes, tensor_memory

LEAST_LAUNCHES = 4
"""Of a segment: a replay and the copies of what it reads cost the host about as much as two or three launches."""
_LEAST_SHARE = 0.5
"""Of a region's launches that must lie in segments."""
_aten = torch.ops.aten
_OWN_MEMORY = frozenset(
    {
        _aten.cat.default, ATTENTION, FLASH_ATTENTION, _aten.linear.default, _aten.embedding.default,
        _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.matmul.default,
    }
)  # fmt: skip
"""Ops whose result never lies in the memory of what they read, beside pointwise ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Ops of fixed sizes that run one after the other.

    Attributes:
        module: the ops.
        inputs: nodes of the region that it reads, in the order of the module's inputs.
        outputs: nodes of the region that others read, in the order of the module's results.
        passed: those of ``inputs`` that ops in between make, and no earlier segment reads.
        stays: places of the outputs in whose memory no result of the region can lie: they are read where the graph left them.
    """

    module: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    passed: tuple[Node, ...]
    stays: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """A region in segments.

    Attributes:
        whole: the region; called with one object for each segment, whose ``run`` gets what is passed to the segment and returns
            its outputs, and after them with the region's inputs.
        parts: the segments, in order.
        placeholders: the region's inputs.
        launches: ops of the region that launch a kernel.
        launches_inside: those of them that lie in segments.
    """

    whole: GraphModule
    parts: tuple[Segment, ...]
    placeholders: tuple[Node, ...]
    launches: int
    launches_inside: int

    @property
    def slots(self) -> tuple[int, ...]:
        """Places of the region's inputs that segments read."""
        read = {node for part in self.parts for node in part.inputs}
        return tuple(slot for slot, node in enumerate(self.placeholders) if node in read)


def split(module: GraphModule, growing: Collection[Any]) -> Segments | None:
    """Split a region; None where that is not allowed, or where less than half of its launches would lie in segments.

    Args:
        module: with open sizes.
        growing: symbols of the sizes that grow.
    """
    if not growing or not _may_be_reordered(module):
        return None
    plan = _Plan(module, frozenset(growing))
    inside = sum(_launches(plan.fixed_at[level]) for level in plan.worth)
    total = _launches(node for node in module.graph.nodes if node.op == "call_function")
    if not plan.worth or inside < _LEAST_SHARE * total:
        return None
    return plan.segments(launches=total, launches_inside=inside)


def _may_be_reordered(module: GraphModule) -> bool:
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node.op != "call_function" or _value(node) is None or written_storages(node) or draws_numbers(node):
            return False
        is_op = isinstance(node.target, torch._ops.OpOverload)
        if node.target._schema.is_mutable if is_op else node.is_impure():
            return False
    return not has_collectives(module)


class _Plan:
    """Which op belongs to which level.

    Attributes:
        level: of each op but for those of ``given``.
        given: inputs, and what costs no launch to make of inputs alone: whoever reads it makes it again.
        fixed_at: by level the ops of fixed sizes.
        worth: levels whose fixed ops are a segment.
    """

    def __init__(self, module: GraphModule, growing: frozenset[Any]) -> None:
        self._module = module
        self._nodes: list[Node] = list(module.graph.nodes)
        given = (_symbols_of(node) for node in self._nodes if node.op == "placeholder")
        self._stay = frozenset[Any]().union(*given) - growing
        self.given: dict[Node, None] = {}
        self.level: dict[Node, int] = {}
        self._fixed: set[Node] = set()
        self.fixed_at: dict[int, list[Node]] = defaultdict(list)
        for node in self._nodes:
            self._place(node)
        self.worth = [level for level, nodes in sorted(self.fixed_at.items()) if self._is_worth(nodes)]
        self._segment_of = {node: level for level in self.worth for node in self.fixed_at[level]}

    def _place(self, node: Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            self.given[node] = None
            return
        if node.op == "output":
            return
        sources = node.all_input_nodes
        is_fixed = not any(self._grows(one) for one in (node, *sources))
        if is_fixed and all(one in self.given for one in sources) and not _launches([node]):
            self.given[node] = None
            return
        made = [one for one in sources if one not in self.given]
        if node.target is operator.getitem and made and made[0] not in self._fixed:
            is_fixed = False  # one of several results
        if is_fixed:
            self._fixed.add(node)
        self.level[node] = max((self.level[one] + int(is_fixed and one not in self._fixed) for one in made), default=0)
        if is_fixed:
            self.fixed_at[self.level[node]].append(node)

    def _grows(self, node: Node) -> bool:
        """Whether a node's value has a size, or is one, that grows, or that follows from values (the count of nonzero ones)."""
        return not _symbols_of(node) <= self._stay

    def _is_worth(self, nodes: Sequence[Node]) -> bool:
        if _launches(nodes) < LEAST_LAUNCHES:
            return False
        return host_work(_module_of(self._module, nodes, self._read_by(nodes), (), self.given)) is None

    def _read_by(self, nodes: Iterable[Node]) -> list[Node]:
        """Return what some ops are given: inputs of the region, and what other ops make."""
        own = set(nodes)
        needed = _with_given(own, self.given)
        inputs = {one for node in needed for one in node.all_input_nodes if one not in needed}
        return [node for node in self._nodes if node in inputs and node.op != "get_attr"]

    def segments(self, *, launches: int, launches_inside: int) -> Segments:
        """Cut the region."""
        known: set[Node] = set()
        parts = []
        for level in self.worth:
            nodes = self.fixed_at[level]
            own = set(nodes)
            inputs = self._read_by(nodes)
            outputs = [node for node in nodes if any(user not in own for user in node.users)]
            passed = [one for one in inputs if one.op == "call_function" and one not in self._segment_of and one not in known]
            known.update(passed)
            stays = frozenset(place for place, node in enumerate(outputs) if not _reaches_results(node))
            part = _module_of(self._module, nodes, inputs, outputs, self.given)
            parts.append(Segment(module=part, inputs=tuple(inputs), outputs=tuple(outputs), passed=tuple(passed), stays=stays))
        placeholders = tuple(node for node in self._nodes if node.op == "placeholder")
        return Segments(
            whole=self._whole(parts, placeholders), parts=tuple(parts), placeholders=placeholders, launches=launches,
            launches_inside=launches_inside,
        )  # fmt: skip

    def _whole(self, parts: Sequence[Segment], placeholders: Sequence[Node]) -> GraphModule:
        graph = Graph()
        players = [graph.placeholder(f"segment_{place}") for place in range(len(parts))]
        copies: dict[Node, Node] = {node: graph.placeholder(node.name) for node in placeholders}
        by_level = dict(zip(self.worth, zip(parts, players, strict=True), strict=True))
        between = [node for node in self._nodes if node in self.level and node not in self._segment_of]
        (output,) = (node for node in self._nodes if node.op == "output")
        needed = _with_given({*between, output}, self.given)
        for node in self._nodes:
            if node in self.given and node in needed and node.op != "placeholder":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        for level in range(max(self.level.values()) + 1):
            if level in by_level:
                part, player = by_level[level]
                made = graph.call_method("run", (player, *(copies[one] for one in part.passed)))
                for place, node in enumerate(part.outputs):
                    if not all(user in self._segment_of for user in node.users):
                        copies[node] = graph.call_function(operator.getitem, (made, place))
            for node in between:
                if self.level[node] == level:
                    copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.node_copy(output, copies.__getitem__)
        return GraphModule(self._module, graph, class_name="RegionInSegments")


def _module_of(
    root: GraphModule, nodes: Iterable[Node], inputs: Sequence[Node], outputs: Sequence[Node], given: Mapping[Node, None]
) -> GraphModule:
    """Return ops as a module of their own; it is interpreted where it is recorded, and needs no code."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    needed = _with_given(set(nodes), given)
    for node in root.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in outputs])
    return fx_trace.lazy_graph_module(root, graph, class_name="Segment")


def _with_given(nodes: set[Node], given: Mapping[Node, None]) -> set[Node]:
    """Return ops with what they make of inputs again, but for the inputs themselves."""
    found, waiting = set(nodes), [source for node in nodes for source in node.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node in given and node.op != "placeholder" and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _launches(nodes: Iterable[Node]) -> int:
    """Count the ops that make a tensor in memory of its own: views, also of weights side by side, launch nothing."""
    return sum(1 for node in nodes if not is_derived(node.target) and _makes_memory(node))


def _makes_memory(node: Node) -> bool:
    return bool(set(_memory(node)).difference(*map(_memory, node.all_input_nodes)))


def _value(node: Node) -> Any:
    """Return what a trace knows of a node's value; one of our kernels with several results has a list of its own."""
    return node.meta.get("val", node.meta.get("results"))


def _memory(node: Node) -> list[int]:
    return [tensor_memory.storage_key(value) for value in tensors_of(_value(node))]


def _symbols_of(node: Node) -> set[Any]:
    value = _value(node)
    return set().union(*map(_symbols, value if isinstance(value, tuple | list) else [value]))


def _symbols(value: Any) -> set[Any]:
    if not isinstance(value, torch.Tensor):
        return symbolic_sizes.symbols_under(value)
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return set().union(*map(symbolic_sizes.symbols_under, sizes))


def _reaches_results(node: Node) -> bool:
    """Whether a result of the region may lie in a node's memory, at any size.

    Whether ``reshape`` copies may depend on the sizes, so what a trace says of it is not asked.
    """
    seen: set[Node] = set()
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output":
                return True
            if user not in seen and not _is_apart(user):
                seen.add(user)
                waiting.append(user)
    return False


def _is_apart(node: Node) -> bool:
    """Whether an op makes memory of its own at all sizes."""
    if "fusion_id" in node.meta:  # a kernel of ours, which allocates its outputs
        return set(_memory(node)).isdisjoint(key for source in node.all_input_nodes for key in _memory(source))
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    is_own = node.target in _OWN_MEMORY or torch.Tag.pointwise in node.target.tags
    return is_own and all(one.alias_info is None for one in node.target._schema.returns)
