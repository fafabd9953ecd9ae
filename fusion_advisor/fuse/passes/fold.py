"""Constant folding: what depends on no input of the model is computed once, when the graph is rewritten.

In transformers' decoders that is the causal mask, the position table and the rotary cos and sin, rebuilt at every step by some
fifty small kernels. Values that depend on buffers (rotary frequencies) are folded as well and computed again when one of those
buffers is exchanged or written to. Parameters are not folded into values: people write to them through ``.data`` (merging an
adapter, loading old checkpoints), which torch does not count, and a cast of a weight would be a second copy of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion_advisor.capture.graph import Region
from fusion_advisor.capture.nodes import storages, written_storages
from fusion_advisor.fuse.held import Held

HELD_LIMIT_BYTES = 256 << 20
"""Folded values of one region together: what would go past it is computed at every call, as before."""


def fold_constants(graph: Graph, region: Region, constants: dict[str, torch.Tensor]) -> int:
    """Replace every value that depends on no input and no parameter by a stored tensor.

    Args:
        graph: rewritten in place.
        region: its buffers are the sources of values that depend on them.
        constants: gets one tensor per value that depends on nothing at all, under the name its ``get_attr`` node uses.

    Returns:
        How many ops are no longer run.
    """
    buffers = _buffers(graph, region)
    foldable = foldable_nodes(graph, buffers)
    frontier = _frontier(foldable)
    for node in frontier:
        sources = [source for source in buffers if source in _sources(node)]
        with graph.inserting_before(node):
            if sources:
                call = Held(f"folded_{node.name}", _computation(node, sources), [buffers[source] for source in sources])
                stored = graph.call_function(call, tuple(sources))
            else:
                name = f"folded_{len(constants)}"
                constants[name] = evaluate([node])[node]
                stored = graph.get_attr(name)
        stored.meta = {**node.meta, "held_bytes": _bytes(node)}
        node.replace_all_uses_with(stored, delete_user_cb=lambda user: user not in foldable)
    return len(foldable)


def held_bytes(graph: Graph) -> int:
    """Return the memory of a rewritten graph's folded values."""
    return sum(node.meta.get("held_bytes", 0) for node in graph.nodes)


def foldable_nodes(graph: Graph, sources: Collection[Node] = ()) -> dict[Node, None]:
    """Return, in order, the ops that depend on no placeholder, draw nothing at random, and own no memory that others may change.

    A stored tensor outlives the call: what the graph writes to (also through a view), or what the caller is given and may write
    to, would differ at the next call.

    Args:
        graph: a region's.
        sources: placeholders that an op may depend on all the same.
    """
    shared = {key for node in graph.nodes for key in written_storages(node)}
    shared |= {key for node in graph.nodes if node.op == "output" for source in node.all_input_nodes for key in storages(source)}
    allowed = {source for source in sources if not shared & set(storages(source))}
    found: dict[Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not _is_pure(node) or shared & set(storages(node)):
            continue
        if all(source in found or source in allowed for source in node.all_input_nodes):
            found[node] = None
    return found


def _frontier(foldable: dict[Node, None]) -> list[Node]:
    """Return what must be stored so that nothing in ``foldable`` runs; what would hold too much is taken out of ``foldable``.

    A view of a buffer stays an op: it costs no kernel, and storing it would save none.
    """
    while True:
        frontier = [node for node in foldable if any(user not in foldable for user in node.users)]
        total, refused = 0, []
        for node in frontier:
            is_stored = isinstance(node.meta.get("val"), torch.Tensor) and not _is_view_of_placeholder(node)
            total += _bytes(node) if is_stored else 0
            if not is_stored or total > HELD_LIMIT_BYTES:
                refused.append(node)
                total -= _bytes(node) if is_stored else 0
        if not refused:
            return frontier
        for node in refused:
            del foldable[node]


def _is_view_of_placeholder(node: Node) -> bool:
    keys = set(storages(node))
    return any(source.op == "placeholder" and keys & set(storages(source)) for source in _sources(node))


def _sources(node: Node) -> set[Node]:
    """Return all nodes that a node depends on."""
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found


def _buffers(graph: Graph, region: Region) -> dict[Node, torch.Tensor]:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    named = zip(placeholders, region.roles, region.example_args, strict=True) if region.roles else ()
    # An inference tensor counts no writes, so a change of it would go unseen.
    return {node: value for node, role, value in named if role == "buffer" and not value.is_inference()}


def _computation(node: Node, sources: list[Node]) -> Callable[..., torch.Tensor]:
    """Return the ops behind a node as a function of its sources, apart from the graph that is being rewritten."""
    needed = _sources(node) | {node}
    graph = Graph()
    copies: dict[Node, Node] = {source: graph.placeholder(source.name) for source in sources}
    for original in node.graph.nodes:
        if original in needed and original not in copies:
            copies[original] = graph.node_copy(original, copies.__getitem__)
    graph.output(copies[node])
    interpreter = torch.fx.Interpreter(torch.fx.GraphModule(torch.nn.Module(), graph))

    def compute(*tensors: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            result = interpreter.run(*tensors)
        assert isinstance(result, torch.Tensor)
        return result

    return compute


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0


def evaluate(nodes: list[Node]) -> dict[Node, Any]:
    """Run the ops that ``nodes`` need (none of which depends on a placeholder) and return their values."""
    values: dict[Node, Any] = {}

    def value_of(node: Node) -> Any:
        if node not in values:
            arguments = torch.fx.node.map_arg(node.args, value_of)
            keywords = torch.fx.node.map_arg(node.kwargs, value_of)
            assert callable(node.target)
            values[node] = node.target(*arguments, **keywords)
        return values[node]

    with torch.no_grad():
        return {node: value_of(node) for node in nodes}


def _is_pure(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return "fusion_id" in node.meta
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags
