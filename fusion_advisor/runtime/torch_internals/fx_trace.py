"""FX: tracing functions into graphs of ATen ops, and graph modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from fusion_advisor.runtime.torch_internals.fake_mode import fake_mode_of

_GET_DATA = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]  # torch has no stub of it
"""What dynamo writes for ``x.data``."""


def lazy_graph_module(root: torch.nn.Module, graph: Graph, *, class_name: str) -> GraphModule:
    """Return a graph module that generates its Python code when it is first called or asked for it.

    For 2,000 nodes that takes 40 ms, and a graph that is only read or interpreted never needs it.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph, class_name=class_name)


def copied_graph(graph_module: GraphModule) -> GraphModule:
    """Return a graph that may be changed, over the same tensors; its nodes keep what was traced."""
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    return lazy_graph_module(graph_module, graph, class_name="Half")


def with_data_detached(graph_module: GraphModule) -> GraphModule:
    """Return dynamo's graph with ``x.detach()`` for ``x.data``; the graph itself where it reads no ``.data``.

    Both share memory with ``x`` and no gradient. Above autograd a trace loses the first: its numbers were taken for constants.

    Args:
        graph_module: dynamo's; it is not changed.
    """
    if not any(node.target is _GET_DATA for node in graph_module.graph.nodes):
        return graph_module
    copied = copied_graph(graph_module)
    for node in copied.graph.nodes:
        if node.target is _GET_DATA:
            node.target = torch.detach
    copied.recompile()
    return copied


def draws_numbers(graph_module: GraphModule) -> bool:
    """Whether an op of a graph is random; attention and dropout are where they drop something.

    Args:
        graph_module: of ATen ops.
    """
    return any(map(_draws, graph_module.graph.nodes))


def _draws(node: Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    assert isinstance(node.target, torch._ops.OpOverload)
    given = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    given |= dict(zip(given, node.args, strict=False)) | dict(node.kwargs)
    share = given.get("dropout_p", given.get("p"))
    return bool(share != 0 and given.get("train") is not False)


def retrace_to_aten(function: Callable[..., Any], fake_inputs: list[Any], *, is_transformed: bool = False) -> GraphModule:
    """Trace ``function`` on fake tensors into ATen ops as the model calls them, before autograd and decomposition.

    With ``is_transformed`` they are those that ``vmap`` and other transforms make of them, below autograd: composite ops are
    decomposed.

    Source lines and module stacks of the nodes that are being interpreted are kept (``preserve_node_meta``).
    """
    with preserve_node_meta(), fake_mode_of(fake_inputs), _outside_tracing_context():
        traced: GraphModule = make_fx(function, pre_dispatch=not is_transformed)(*fake_inputs)
    return traced


def is_associative_scan(node: Node) -> bool:
    """Whether a node of dynamo's graph is an ``associative_scan`` as one op."""
    return node.op == "call_function" and str(node.target) == "associative_scan"


def scan_in_levels(combine: Callable[..., Any], values: list[torch.Tensor], more: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Compute an ``associative_scan`` along the first dim as torch's eager op does, in about 2 log₂(size) levels."""
    from torch._higher_order_ops.associative_scan import generic_associative_scan

    return tuple(generic_associative_scan(combine, values, additional_inputs=more))


@contextlib.contextmanager
def _outside_tracing_context() -> Iterator[None]:
    # make_fx looks for a fake mode in the tracing context first, and inside a dynamo backend that is a different one.
    context = TracingContext.try_get()
    if context is None:
        yield
        return
    before = context.fake_mode
    context.fake_mode = None
    try:
        yield
    finally:
        context.fake_mode = before
