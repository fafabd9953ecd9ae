"""FX: tracing functions into graphs of ATen ops, and graph modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from fusion_advisor.runtime.torch_internals.fake_mode import fake_mode_of


def lazy_graph_module(root: torch.nn.Module, graph: torch.fx.Graph, *, class_name: str) -> torch.fx.GraphModule:
    """Return a graph module that generates its Python code when it is first called or asked for it.

    For 2,000 nodes that takes 40 ms, and a graph that is only read or interpreted never needs it.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph, class_name=class_name)


def retrace_to_aten(
    function: Callable[..., Any], fake_inputs: list[Any], *, is_transformed: bool = False
) -> torch.fx.GraphModule:
    """Trace ``function`` on fake tensors into ATen ops as the model calls them, before autograd and decomposition.

    With ``is_transformed`` they are those that ``vmap`` and other transforms make of them, below autograd: composite ops are
    decomposed.

    Source lines and module stacks of the nodes that are being interpreted are kept (``preserve_node_meta``).
    """
    with preserve_node_meta(), fake_mode_of(fake_inputs), _outside_tracing_context():
        traced: torch.fx.GraphModule = make_fx(function, pre_dispatch=not is_transformed)(*fake_inputs)
    return traced


def is_associative_scan(node: torch.fx.Node) -> bool:
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
