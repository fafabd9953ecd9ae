"""Values that follow from the sizes alone: position ids, causal masks, ranges. Each exact shape computes them once.

A traced model builds its mask in every call, for it depends on the length. In a graph of one size such values are constants; with
open sizes they are functions of the sizes, computed when a shape first comes and kept as long as there is room. A mask that says
no more than "causal" at a shape becomes the flag there: it is looked at, element by element, for that very shape.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.capture.graph.fx_nodes import storages, tensors_of, written_storages
from fusion_advisor.fuse.passes.attention import masked_calls, meaning_of, put_flag
from fusion_advisor.runtime.torch_internals import symbolic_sizes

MOST_HELD_BYTES = 256 << 20
"""Of one graph, over all shapes; a value of a shape that finds no room is computed in each call."""


def _is_recording() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class SizeValues:
    """Computes values of sizes, and keeps them.

    Args:
        compute: makes the values of some sizes.
        is_recording: whether the call is being recorded into a CUDA graph. Then nothing is kept: no replay has computed it yet,
            and other graphs may share the memory that it lies in.

    Attributes:
        held_bytes: of what is kept.
        most_bytes: that are kept.
    """

    def __init__(self, compute: GraphModule, is_recording: Callable[[], bool] = _is_recording) -> None:
        self._compute, self._is_recording = compute, is_recording
        self._known: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self.held_bytes = 0
        self.most_bytes = MOST_HELD_BYTES
        self.__name__ = self.__qualname__ = "size_values"

    def __call__(self, *sizes: int) -> tuple[Any, ...]:
        """Return the values at some sizes. What is kept stays: a recorded CUDA graph may read it."""
        found = self._known.get(sizes)
        if found is None:
            with torch.no_grad():
                found = tuple(self._compute(*sizes))
            needed = sum(value.untyped_storage().nbytes() for value in found)
            if self.held_bytes + needed <= self.most_bytes and not self._is_recording():
                self._known[sizes] = found
                self.held_bytes += needed
        return found


def keep_size_values(module: GraphModule) -> int:
    """Compute values that follow from sizes alone once for each shape; return how many ops no longer run in each call.

    Args:
        module: a graph with open sizes; changed in place.
    """
    graph = module.graph
    alone = _of_sizes_alone(graph)
    frontier = [node for node in alone if _is_worth(node) and any(user not in alone for user in node.users)]
    early = _sizes_to_the_top(graph)
    frontier = [node for node in frontier if early.issuperset(_sizes_read([node]))]
    sizes = _sizes_read(frontier)
    if not frontier:
        return 0
    values = SizeValues(_computing(module, frontier, sizes))
    after = max(sizes, key=list(graph.nodes).index) if sizes else [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(after):
        call = graph.call_function(values, tuple(sizes))
    call.meta["val"] = tuple(node.meta["val"] for node in frontier)
    before = sum(node.op == "call_function" for node in graph.nodes)
    for place, node in reversed(list(enumerate(frontier))):
        with graph.inserting_after(call):
            item = graph.call_function(operator.getitem, (call, place))
        item.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in alone)
    for node in reversed(alone):
        if not node.users:
            graph.erase_node(node)
    graph.lint()
    module.recompile()
    return before - sum(node.op == "call_function" for node in graph.nodes)


def compute_ahead(module: GraphModule, symbols: Mapping[Any, int]) -> None:
    """Compute what follows from the sizes of a shape ahead of its first call: were that recorded, each replay would compute it.

    Args:
        module: a graph with open sizes.
        symbols: the sizes that its symbols stand for.
    """
    for node in module.graph.nodes:
        if isinstance(node.target, SizeValues):
            node.target(*(symbolic_sizes.at_sizes(symbolic_sizes.expression_of(one.meta["val"]), symbols) for one in node.args))


def flagged(module: GraphModule, sizes: Sequence[str], at: Sequence[int]) -> tuple[GraphModule, Callable[..., bool]] | None:
    """Return the graph with flags in place of masks, and whether the masks of some sizes say just that; None where none does.

    Args:
        module: a graph with open sizes, left as it is.
        sizes: names of the graph inputs, or of other nodes, that are the sizes, in order.
        at: the sizes at which to see what the masks say.
    """
    alone = _of_sizes_alone(module.graph)
    calls = {call.name: mask for call, mask in masked_calls(module.graph).items() if mask in alone}
    if not calls:
        return None
    masks = list(dict.fromkeys(calls.values()))
    places = [node for name in sizes for node in module.graph.nodes if node.name == name]
    if not set(_sizes_read(masks)) <= set(places):
        return None
    compute = _computing(module, masks, places)
    meanings = tuple(meaning_of(value) for value in compute(*at))
    if not any(meanings):
        return None
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    said = dict(zip(masks, meanings, strict=True))
    for call in [node for node in module.graph.nodes if node.name in calls]:
        meaning = said[calls[call.name]]
        if meaning is not None:
            put_flag(copies[call], meaning)
    graph.eliminate_dead_code()

    def says_the_same(*point: int) -> bool:
        with torch.no_grad():
            values = compute(*point)
        return all(one is None or meaning_of(value) == one for value, one in zip(values, meanings, strict=True))

    return GraphModule(module, graph, class_name="FlaggedRegion"), says_the_same


def _of_sizes_alone(graph: Graph) -> dict[Node, None]:
    """Return the ops whose tensors follow from sizes alone, and whose memory nobody writes to or is given, in order."""
    written = {key for node in graph.nodes for key in written_storages(node)}
    given = {key for node in graph.nodes if node.op == "output" for source in node.all_input_nodes for key in storages(source)}
    found: dict[Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function" or symbolic_sizes.is_size(node.meta.get("val")):
            continue
        sources = [one for one in node.all_input_nodes if not symbolic_sizes.is_size(one.meta.get("val"))]
        if not _is_pure(node) or not tensors_of(node.meta.get("val")) or not all(one in found for one in sources):
            continue
        if not (written | given).intersection(storages(node)):
            found[node] = None
    return found


def _sizes_to_the_top(graph: Graph) -> set[Node]:
    """Move what follows from the sizes of inputs up to the inputs; return all such sizes.

    A model adds to a length where it needs the sum, and what reads an earlier value of sizes may stand above that.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    found = {node for node in inputs if symbolic_sizes.is_size(node.meta.get("val"))}
    computed: list[Node] = []
    for node in graph.nodes:
        if node.op != "call_function" or not symbolic_sizes.is_size(node.meta.get("val")):
            continue
        reads_input = node.target is torch.ops.aten.sym_size.int and node.args[0] in inputs
        if reads_input or found.issuperset(node.all_input_nodes):
            found.add(node)
            computed.append(node)
    for node in reversed(computed):
        inputs[-1].append(node)
    return found


def _is_pure(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def _is_worth(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _sizes_read(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes of sizes that some values are computed from."""
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        for source in node.all_input_nodes:
            if symbolic_sizes.is_size(source.meta.get("val")):
                found[source] = None
            elif source not in seen:
                seen.add(source)
                waiting.append(source)
    return list(found)


def _computing(module: GraphModule, nodes: Sequence[Node], sizes: Sequence[Node]) -> GraphModule:
    """Return a graph of sizes that computes some values."""
    graph = Graph()
    copies: dict[Node, Node] = {node: graph.placeholder(node.name) for node in sizes}
    needed = _needed(nodes)
    for node in module.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in nodes))
    return GraphModule(module, graph, class_name="ValuesOfSizes")


def _needed(nodes: Sequence[Node]) -> set[Node]:
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and not symbolic_sizes.is_size(node.meta.get("val")):
            found.add(node)
            waiting += node.all_input_nodes
    return found
