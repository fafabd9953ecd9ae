"""Runs a backward pass that frees what the forward pass kept as soon as it has read it for the last time.

A call with positional arguments holds them until it returns, and with them all activations of a step. Autograd hands a backward
pass its arguments as a list that nobody else reads: a graph that takes them out of the list owns them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

Strides = tuple[tuple[int, ...] | None, ...]


class FreeingCall:
    """A graph that empties the list of its arguments.

    It cannot fall back once it has begun, for its arguments are gone. So it serves only arguments that are laid out like those
    that the graph was verified with: then every value in it is, too.

    Args:
        module: takes its arguments one by one.
        args: of the call that it was verified with.
    """

    def __init__(self, module: GraphModule, args: Sequence[Any]) -> None:
        self._strides = _strides(args)
        self._call = taking_a_list(module).forward

    @classmethod
    def of(cls, call: Any, args: Sequence[Any]) -> FreeingCall | None:
        """Return it for the ``forward`` of a graph; None for any other call.

        Args:
            call: runs a pass.
            args: of the call that it was verified with.
        """
        module = getattr(call, "__self__", None)
        return cls(module, args) if isinstance(module, GraphModule) else None

    def serves(self, args: Sequence[Any]) -> bool:
        """Whether arguments are laid out like those of the call that was verified."""
        return _strides(args) == self._strides

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph; the list is empty afterwards."""
        return self._call(args)


def _strides(args: Sequence[Any]) -> Strides:
    return tuple(arg.stride() if isinstance(arg, torch.Tensor) else None for arg in args)


def taking_a_list(module: GraphModule) -> GraphModule:
    """Return a graph that takes one list and empties it, over the same kernels and tensors.

    Args:
        module: takes the list's items one by one; it stays as it is.
    """
    graph, copies = Graph(), dict[Node, Node]()
    given = graph.placeholder("given")
    for node in reversed([node for node in module.graph.nodes if node.op == "placeholder"]):
        copies[node] = graph.call_method("pop", (given,))
    graph.output(graph.graph_copy(module.graph, copies))
    return GraphModule(module, graph)
