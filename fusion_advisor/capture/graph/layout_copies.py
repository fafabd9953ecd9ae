"""Copies that give the values after them a better layout: put into the captured graph, and taken out again where they do not pay.

Two rules put them there (``contiguous_rows``, ``channels_last``). Each copy is marked with its rule's id, which is the id of the
graph pass that keeps it: without the pass the copy goes. Values are the same with and without, and what the model returns keeps
its strides. What is written to is left alone: what is written through a view lies in one memory only as long as nobody copies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.capture.graph.fx_nodes import is_idle_dropout, storages, tensors_of, written_storages
from fusion_advisor.capture.series.as_images import keep_images, show_as_series
from fusion_advisor.runtime.torch_internals import fake_mode, symbolic_sizes

LAID_OUT = "is_laid_out"
"""In a node's ``meta``: the id of the rule whose copy it is, as long as no rewrite has taken it."""
_CONTIGUOUS = torch.ops.aten.contiguous.default


class Relayout:
    """Copies being put into a graph; all of them go again unless they are kept.

    Attributes:
        copies: made so far.
        restored: those of them that give a value back the layout which its op does not keep.

    Args:
        graph_module: traced on fake tensors.
        kind: id of the rule.
        losers: given a node with its new result, returns the readers that should get the copy's layout all the same.
        fake_result: returns a node's fake result; left out, torch says.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        kind: str,
        *,
        losers: Callable[[Node], list[Node]] = lambda _: [],
        fake_result: FakeResult | None = None,
    ) -> None:
        self._module = graph_module
        self._kind = kind
        self._losers = losers
        self._fake_result = fake_result or result_of
        self.restored: list[Node] = []
        self._before: dict[Node, Any] = {node: node.meta.get("val") for node in graph_module.graph.nodes}
        self._read: dict[Node, tuple[Any, Any]] = {node: (node.args, node.kwargs) for node in graph_module.graph.nodes}
        self._written = {key for node in graph_module.graph.nodes for key in written_storages(node)}
        self.copies: list[Node] = []

    def copy(self, start: Node, memory_format: torch.memory_format, readers: Iterable[Node] | None = None) -> bool:
        """Put a copy after a value, and give what follows its new layout.

        Args:
            start: the value.
            memory_format: of the copy.
            readers: of the copy; None: all of the value's but the caller of the graph, who gets the value itself.

        Returns:
            False where something that follows is written to.
        """
        if readers is None:
            readers = [user for user in start.users if user.op != "output"]
        made = self._put(start, list(readers), memory_format)
        return self._follow(made, memory_format)

    def keep(self) -> bool:
        """Give what the model returns its strides back, and keep the copies; without one, or where that fails, undo all of it."""
        output = next(node for node in self._module.graph.nodes if node.op == "output")
        for source in output.all_input_nodes:
            was, now = ([*map(_strides, tensors_of(one))] for one in (self._before.get(source), source.meta["val"]))
            if source not in self._before or was == now:
                continue
            if not _is_contiguous(self._before[source]):
                return self.undo()
            self._put(source, [output], torch.contiguous_format)
        self._module.recompile()
        return bool(self.copies)

    def undo(self) -> bool:
        """Take all copies out again; returns False."""
        for node, (args, kwargs) in self._read.items():
            node.args, node.kwargs = args, kwargs
            if self._before[node] is not None:
                node.meta["val"] = self._before[node]
        for made in reversed(self.copies):
            self._module.graph.erase_node(made)
        self.copies.clear()
        self.restored.clear()
        self._module.recompile()
        return False

    def _put(self, start: Node, readers: list[Node], memory_format: torch.memory_format) -> Node:
        with self._module.graph.inserting_before(min(readers)):
            made = self._module.graph.call_function(_CONTIGUOUS, (start,), {"memory_format": memory_format})
        made.meta = {key: start.meta[key] for key in ("nn_module_stack", "stack_trace") if key in start.meta}
        made.meta["val"] = fake_mode.fake_result(self._module, made)
        made.meta[LAID_OUT] = self._kind
        for reader in readers:
            reader.replace_input_with(start, made)
        self.copies.append(made)
        return made

    def _follow(self, made: Node, memory_format: torch.memory_format) -> bool:
        changed = {made}
        for node in list(self._module.graph.nodes):
            if node.op != "call_function" or node in changed or changed.isdisjoint(node.all_input_nodes):
                continue
            if not self._written.isdisjoint(storages(node)):
                return False
            try:
                node.meta["val"] = self._fake_result(self._module, node)
            except (RuntimeError, ValueError):  # a view that another layout does not allow
                for source in [one for one in node.all_input_nodes if one in changed]:
                    if not _is_contiguous(self._before.get(source)):
                        return False
                    self._put(source, [node], torch.contiguous_format)
                continue
            changed.add(node)
            if readers := self._losers(node):
                self.restored.append(self._put(node, readers, memory_format))
                changed.add(self.restored[-1])
        return True


FakeResult = Callable[[GraphModule, Node], Any]
"""Returns what a node returns on fake tensors."""


def result_of(graph_module: GraphModule, node: Node) -> Any:
    """Return a node's fake result; a dropout that drops nothing returns its input, as eager does."""
    return node.all_input_nodes[0].meta["val"] if is_idle_dropout(node) else fake_mode.fake_result(graph_module, node)


def kinds_of(graph: Graph) -> tuple[str, ...]:
    """Return the rules whose copies a graph has, each once."""
    return tuple(dict.fromkeys(node.meta[LAID_OUT] for node in graph.nodes if LAID_OUT in node.meta))


def keep_copies(graph: Graph, kind: str) -> int:
    """Keep a rule's copies from being taken out; returns how many."""
    marked = [node for node in graph.nodes if node.meta.get(LAID_OUT) == kind]
    keep_images(graph, kind)
    for node in marked:
        del node.meta[LAID_OUT]
        _pass_by(graph, node)
    return len(marked)


def _pass_by(graph: Graph, copy: Node) -> None:
    """Let a copy read what the model copied away from the same layout: the model's own copy goes, and this one copies nothing.

    A diffusion net does that: rows of pixels become an image again, ``permute(...).contiguous()``, ahead of a convolution.
    """
    own = copy.all_input_nodes[0]
    if own.target is not _CONTIGUOUS or LAID_OUT in own.meta or len(own.args) != 1:
        return
    given, wanted = own.all_input_nodes[0].meta.get("val"), copy.kwargs["memory_format"]
    if not isinstance(given, torch.Tensor) or not isinstance(wanted, torch.memory_format):
        return
    reads_alone = all(user.target is torch.ops.aten.conv2d.default for user in copy.users)
    if reads_alone and given.is_contiguous(memory_format=wanted):
        copy.replace_input_with(own, own.all_input_nodes[0])
        if not own.users:
            graph.erase_node(own)


def take_copies_out(graph: Graph, kind: str | None = None) -> set[Node]:
    """Take out the copies that no rewrite has taken; returns their readers, and the ops of convolutions that are of series again.

    Args:
        graph: changed in place.
        kind: of one rule; None: of all.
    """
    readers: set[Node] = set()
    for node in [node for node in graph.nodes if node.meta.get(LAID_OUT, "") and kind in (None, node.meta[LAID_OUT])]:
        readers.discard(node)
        readers.update(node.users)
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)
    return readers | show_as_series(graph, kind)


def undo(graph_module: GraphModule, kind: str) -> None:
    """Take a rule's copies out of a captured graph for good: layouts are as without them."""
    changed = take_copies_out(graph_module.graph, kind)
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and (node in changed or not changed.isdisjoint(node.all_input_nodes)):
            node.meta["val"] = result_of(graph_module, node)
            changed.add(node)
    graph_module.recompile()


def _strides(value: torch.Tensor) -> list[Any]:
    return [*map(symbolic_sizes.expression_of, value.stride())]


def _is_contiguous(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and symbolic_sizes.at_example(value).is_contiguous()
