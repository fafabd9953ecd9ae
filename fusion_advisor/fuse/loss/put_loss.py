"""Puts the chunked loss into a copy of dynamo's graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.fuse.loss.find_log_sums import made_late, place_of
from fusion_advisor.fuse.loss.find_loss import LossSite


@dataclass(frozen=True, slots=True)
class ChunkedGraph:
    """A graph whose losses are computed in chunks.

    Attributes:
        module: the graph.
        dropped: places of the graph's results that it returns as None, for they were logits.
    """

    module: GraphModule
    dropped: tuple[int, ...] = ()

    def like(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call of the graph as it was that returns None in the same places.

        Args:
            call: returns a sequence.
        """
        if not self.dropped:
            return call

        def run(*args: Any) -> tuple[Any, ...]:
            return tuple(None if place in self.dropped else value for place, value in enumerate(call(*args)))

        return run


def with_chunked_losses(graph_module: GraphModule, sites: Sequence[LossSite]) -> ChunkedGraph:
    """Return a copy of a graph with the losses of some sites computed in chunks.

    Args:
        graph_module: dynamo's; it stays as it is.
        sites: without refusals. What they return of the logits becomes None.
    """
    graph, copies, dropped = _without_returned(graph_module, sites)
    for site in sites:
        _put(graph, site, copies)
    return ChunkedGraph(_module_of(graph_module, graph), dropped)


def with_all_logits(graph_module: GraphModule, sites: Sequence[LossSite]) -> GraphModule:
    """Return a copy of a graph with its losses as they are that returns None for the logits of some sites.

    So no gradient of theirs exists: autograd gives a pass of two outputs zeros for the one that the loss is not.

    Args:
        graph_module: dynamo's; it stays as it is.
        sites: as for :func:`with_chunked_losses`.
    """
    graph, _, _ = _without_returned(graph_module, sites)
    return _module_of(graph_module, graph)


def _without_returned(graph_module: GraphModule, sites: Sequence[LossSite]) -> tuple[Graph, dict[Node, Node], tuple[int, ...]]:
    """Copy a graph; returns also its nodes' copies and the places of logits, which are None in its results."""
    graph, copies = Graph(), dict[Node, Node]()
    results = graph.graph_copy(graph_module.graph, copies)
    gone = {copies[node] for site in sites for node in site.returned}
    assert isinstance(results, tuple | list)
    dropped = tuple(place for place, node in enumerate(results) if node in gone)
    graph.output(tuple(None if place in dropped else node for place, node in enumerate(results)))
    return graph, copies, dropped


def _module_of(graph_module: GraphModule, graph: Graph) -> GraphModule:
    module = GraphModule(graph_module, graph)
    module.meta.update(graph_module.meta)
    return module


def _put(graph: Graph, site: LossSite, copies: dict[Node, Node]) -> None:
    linear, loss = copies[site.linear], copies[site.loss]
    given = dict(zip(("input", "weight", "bias"), linear.args, strict=False)) | dict(linear.kwargs)
    hidden, value = given["input"], site.linear.meta["example_value"]
    # The modules register ops of torch's: 20 ms of each start of a saved plan, which has no loss.
    from fusion_advisor.fuse.loss.log_sums_op import linear_cross_entropy_and_log_sums
    from fusion_advisor.fuse.loss.loss_op import linear_cross_entropy

    assert isinstance(hidden, Node)
    width = hidden.meta["example_value"].shape[-1]
    labels = site.given["target"]
    place = copies[place_of(site.log_sums, site.loss)]
    for node in made_late(site.log_sums, site.loss, labels):
        place.prepend(copies[node])
    log_sums = [copies[node] for node in site.log_sums.nodes]
    with graph.inserting_before(place):
        before = value
        for step in site.steps:
            after = step.meta["example_value"]
            if step.target is operator.getitem:
                hidden = graph.call_function(operator.getitem, (hidden, step.args[1]))
            elif after.shape != before.shape:
                hidden = graph.call_function(torch.reshape, (hidden, (*after.shape[:-1], width)))
            before = after
        chunked = graph.call_function(
            linear_cross_entropy_and_log_sums if log_sums else linear_cross_entropy,
            (
                hidden, given["weight"], given.get("bias"), copies[labels], value.dtype, loss.meta["example_value"].dtype,
                site.reduction, site.given["ignore_index"], site.given["label_smoothing"],
            ),
        )  # fmt: skip
        if log_sums:
            chunked, sums = (graph.call_function(operator.getitem, (chunked, number)) for number in (0, 1))
            _replace_log_sums(graph, log_sums, sums)
    chunked.meta = dict(loss.meta)
    loss.replace_all_uses_with(chunked)
    branches = (copies[step] for step in reversed(site.log_sums.steps))
    for node in (loss, *log_sums, *branches, *(copies[step] for step in reversed(site.steps)), linear):
        graph.erase_node(node)


def _replace_log_sums(graph: Graph, log_sums: Sequence[Node], sums: Node) -> None:
    """Put the rows' numbers, in each call's shape and dtype, in place of calls of ``logsumexp``."""
    for node in log_sums:
        value = node.meta["example_value"]
        shaped = graph.call_function(torch.reshape, (sums, tuple(value.shape)))
        cast = graph.call_method("to", (shaped, value.dtype))
        cast.meta = dict(node.meta)
        node.replace_all_uses_with(cast)
