"""Constant folding: values that nothing outside the graph can change are computed once, when the graph is rewritten.

In transformers' decoders these are the causal mask and the position table, rebuilt at every step by some dozens of small kernels.
A table that the graph makes and fills in place (BEiT's positions in a window) is folded with its writes, and one in host memory
that indexes a tensor of the device is stored on the device: copying it there at every call would keep a step out of CUDA graphs.

By default a folded value depends on no input, no buffer and no parameter. A write through ``tensor.data``, a numpy or dlpack
alias or the storage counts no version in torch, so the host cannot see it, and comparing the sources on the device would take as
many launches as computing the value. So the step computes what depends on a buffer (rotary cos and sin of ``inv_freq``), as the
model does. These ops are a chain like any other: the whole rotary table costs a GPU one small kernel where that pays.

``--freeze`` folds values of buffers and parameters as well (:func:`fold_frozen`), under a contract with the user: weights and
buffers are not written while the fusion is in place, or ``fused.refresh()`` is called after the write. Writes that torch counts
and exchanged tensors are seen even then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion_advisor.capture.graph.fx_nodes import storages, written_storages
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.rewrite.derived_tensors import Held
from fusion_advisor.fuse.rewrite.record import PassRewrite

HELD_LIMIT_BYTES = 256 << 20
"""Folded values of one region together: what would go past it is computed at every call, as before."""


def fold_constants(graph: Graph, region: Region, constants: dict[str, torch.Tensor]) -> int:
    """Replace every value that depends on no placeholder by a stored tensor.

    Args:
        graph: rewritten in place.
        region: holds the literals of the model's own code (``torch.tensor(511)``).
        constants: gets one tensor per value, under the name that its ``get_attr`` node uses.

    Returns:
        How many ops are no longer run.
    """
    literals = literals_of(graph, region)
    filled = _filled_storages(graph, literals)
    foldable = foldable_nodes(graph, literals, filled)
    of_tables = [node for node in foldable if _touched(node) & filled]
    frontier = _frontier(foldable, held_bytes(graph))
    if not foldable.keys() >= set(of_tables):
        foldable = foldable_nodes(graph, literals)  # part of a table that is filled in place would be too large to hold
        frontier = _frontier(foldable, held_bytes(graph))
    for node, value in evaluate(frontier, literals, foldable).items():
        name = f"folded_{len(constants)}"
        constants[name] = value
        with graph.inserting_before(node):
            stored = graph.get_attr(name)
        _put(node, stored, foldable)
        _index_on_device(graph, stored, constants)
    for node in reversed(list(foldable)):
        if not node.users:
            graph.erase_node(node)  # nothing else would take out an op that writes
    return len(foldable)


def _index_on_device(graph: Graph, stored: Node, constants: dict[str, torch.Tensor]) -> None:
    """Let tensors of another device be indexed with a copy of a stored host tensor that lies there."""
    value = constants[str(stored.target)]
    for user in list(stored.users):
        source = user.args[0]
        if user.target is not torch.ops.aten.index.Tensor or not isinstance(source, Node) or value.device.type != "cpu":
            continue
        device = source.meta["val"].device
        if device.type == "cpu":
            continue
        name = f"{stored.target}_on_{device.type}"
        constants[name] = value.to(device)
        with graph.inserting_before(user):
            there = graph.get_attr(name)
        there.meta = {**stored.meta, "val": stored.meta["val"].to(device)}
        user.replace_input_with(stored, there)


def fold_frozen(graph: Graph, region: Region, constants: dict[str, torch.Tensor]) -> int:
    """Replace every value that depends on buffers and parameters alone by a call that computes it when they change.

    A change means another tensor, or a write that torch counts. Any other write needs ``FusedModel.refresh``.

    Args:
        graph: rewritten in place.
        region: its buffers and parameters are the sources.
        constants: stored tensors of ``fold_constants``, which the values may depend on too.

    Returns:
        How many ops are no longer run.
    """
    sources = _frozen(graph, region)
    stored_before = [node for node in graph.nodes if node.op == "get_attr" and node.target in constants]
    all_foldable = foldable_nodes(graph, {*sources, *stored_before})
    foldable = {node: None for node in all_foldable if not _sources(node).isdisjoint(sources)}
    for node in _frontier(foldable, held_bytes(graph)):
        mine = [source for source in sources if source in _sources(node)]
        call = Held(f"frozen_{node.name}", _computation(node, mine, constants), [sources[source] for source in mine])
        with graph.inserting_before(node):
            stored = graph.call_function(call, tuple(mine))
        _put(node, stored, foldable)
    return len(foldable)


def _put(node: Node, stored: Node, foldable: dict[Node, None]) -> None:
    # A folded kernel is called no more, so the value is no site of its fusion.
    stored.meta = {**{name: value for name, value in node.meta.items() if name != "fusion_id"}, "held_bytes": _bytes(node)}
    node.replace_all_uses_with(stored, delete_user_cb=lambda user: user not in foldable)


def held_bytes(graph: Graph) -> int:
    """Return the memory of a rewritten graph's folded values, those of ``fold_frozen`` among them."""
    return sum(node.meta.get("held_bytes", 0) for node in graph.nodes)


def frozen_bytes(graph: Graph) -> int:
    """Return the memory of the values that ``fold_frozen`` folded."""
    return sum(node.meta.get("held_bytes", 0) for node in graph.nodes if isinstance(node.target, Held))


def foldable_nodes(graph: Graph, sources: Collection[Node] = (), filled: Collection[int] = ()) -> dict[Node, None]:
    """Return, in order, the ops that depend on no placeholder, draw nothing at random, and own no memory that others may change.

    A stored tensor outlives the call: what the graph writes to (also through a view), or what the caller is given and may write
    to, would differ at the next call.

    Args:
        graph: a region's.
        sources: placeholders and stored tensors that an op may depend on all the same.
        filled: storages that the graph may write to all the same, as keys.
    """
    shared = {key for node in graph.nodes for key in written_storages(node)}.difference(filled)
    shared |= {key for node in graph.nodes if node.op == "output" for source in node.all_input_nodes for key in storages(source)}
    allowed = {source for source in sources if not shared & set(storages(source))}
    found: dict[Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function" or shared & set(storages(node)) or not _is_pure(node, filled):
            continue
        if all(source in found or source in allowed for source in node.all_input_nodes):
            found[node] = None
    return found


def _filled_storages(graph: Graph, sources: Collection[Node]) -> set[int]:
    """Return the storages that a graph makes, fills with constants, and reads outside of that only after the last write."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    last = {key: order[node] for node in graph.nodes for key in written_storages(node)}
    others = [node for node in graph.nodes if node.op != "call_function"]
    given = [source for node in others for source in ([*node.all_input_nodes] if node.op == "output" else [node])]
    filled = set(last).difference(*(storages(node) for node in given))
    while filled:
        found = foldable_nodes(graph, sources, filled)
        lost = {
            key
            for node in graph.nodes
            for key in _touched(node) & filled
            if node not in found and (order[node] < last[key] or key in {*storages(node), *written_storages(node)})
        }
        if not lost:
            break
        filled -= lost
    return filled


def _touched(node: Node) -> set[int]:
    """Return the storages that an op reads, writes or returns, as keys."""
    return {*storages(node), *written_storages(node), *(key for source in node.all_input_nodes for key in storages(source))}


def literals_of(graph: Graph, region: Region) -> dict[Node, torch.Tensor]:
    """Return the tensors that a graph holds because the model's code spells them out, by the op that reads each.

    Args:
        graph: a copy of the region's.
        region: whose graph has the tensors.
    """
    read = [node for node in graph.nodes if node.op == "get_attr" and hasattr(region.graph, str(node.target))]
    return {node: getattr(region.graph, str(node.target)) for node in read}


def _frontier(foldable: dict[Node, None], held_bytes: int) -> list[Node]:
    """Return what must be stored so that nothing in ``foldable`` runs; what would hold too much is taken out of ``foldable``.

    A view of a buffer stays an op: it costs no kernel, and storing it would save none.

    Args:
        foldable: candidates, in order.
        held_bytes: bytes that the region's graph holds already.
    """
    while True:
        frontier = [node for node in foldable if any(user not in foldable for user in node.users)]
        total, refused = held_bytes, []
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


def _frozen(graph: Graph, region: Region) -> dict[Node, torch.Tensor]:
    """Return the placeholders of buffers and parameters, with their tensors."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    named = zip(placeholders, region.roles, region.example_args, strict=True) if region.roles else ()
    # An inference tensor counts no writes, so a change of it would go unseen.
    return {node: value for node, role, value in named if role in ("buffer", "parameter") and not value.is_inference()}


def _computation(node: Node, sources: list[Node], constants: Mapping[str, torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the ops that lead to a node as a function of its sources, in a graph of their own."""
    needed = _sources(node) | {node}
    graph = Graph()
    copies: dict[Node, Node] = {source: graph.placeholder(source.name) for source in sources}
    for original in node.graph.nodes:
        if original in needed and original not in copies:
            copies[original] = graph.node_copy(original, copies.__getitem__)
    graph.output(copies[node])
    stored = {str(one.target): constants[str(one.target)] for one in needed if one.op == "get_attr"}
    interpreter = torch.fx.Interpreter(torch.fx.GraphModule(stored, graph))

    def compute(*tensors: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            result = interpreter.run(*tensors)
        assert isinstance(result, torch.Tensor)
        return result

    return compute


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0


def evaluate(
    nodes: list[Node], literals: Mapping[Node, torch.Tensor] | None = None, among: Collection[Node] = ()
) -> dict[Node, Any]:
    """Run the ops that ``nodes`` need, in the graph's order, and return their values.

    Args:
        nodes: none depends on a placeholder.
        literals: tensors of the graph that they read.
        among: ops that may write to what they read.
    """
    if not nodes:
        return {}
    values: dict[Node, Any] = dict(literals or {})
    needed = _needed(nodes, [node for node in among if written_storages(node)])
    with torch.no_grad():
        for node in nodes[0].graph.nodes:
            if node in needed and node not in values:
                arguments = torch.fx.node.map_arg(node.args, values.__getitem__)
                keywords = torch.fx.node.map_arg(node.kwargs, values.__getitem__)
                assert callable(node.target)
                values[node] = node.target(*arguments, **keywords)
    return {node: values[node] for node in nodes}


def _needed(nodes: Collection[Node], writers: Collection[Node]) -> set[Node]:
    """Return the ops that lead to ``nodes``: what they read, and what writes to memory that they read."""
    found, waiting = set(nodes), list(nodes)
    while waiting:
        node = waiting.pop()
        keys = set(storages(node))
        for source in (*node.all_input_nodes, *(one for one in writers if keys.intersection(written_storages(one)))):
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found


def _is_pure(node: Node, filled: Collection[int] = ()) -> bool:
    """Whether an op only computes, or writes to ``filled`` storages alone."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return "fusion_id" in node.meta and set(written_storages(node)) <= set(filled)
    is_random = torch.Tag.nondeterministic_seeded in node.target.tags
    is_writing = node.target._schema.is_mutable and not (filled and set(written_storages(node)) <= set(filled))
    return not is_writing and not is_random


FOLD_CONSTANTS = PassRewrite(
    id="fold-constants",
    title="folded constants",
    apply=fold_constants,
    held_bytes=lambda graph: held_bytes(graph) - frozen_bytes(graph),
    after={"drop-masks": "a mask must still be an expression when it is evaluated"},
)
FOLD_FROZEN = PassRewrite(
    id="fold-frozen",
    title="folded weights (--freeze)",
    apply=fold_frozen,
    held_bytes=frozen_bytes,
    needs_freeze=True,
    after={"fold-constants": "its stored tensors are sources here"},
)
