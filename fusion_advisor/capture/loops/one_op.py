"""Leave an unrolled loop as one op of the graph: its kernels are counted for it, and chains are not sought in its steps.

Mamba with 6 layers and 1,024 tokens is 55,781 ops, 55,000 of them in six loops. The op runs the loop's own ATen ops in their own
order, so numbers and kernels are those of the model. In a trace, every kernel that it launches lies within its range.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from fusion_advisor.capture.graph.tracer import LiveCapture
from fusion_advisor.capture.loops.recurrence import LEAST_STEPS, Recurrence, find_recurrences
from fusion_advisor.records.op_facts import LOOP_PREFIX
from fusion_advisor.runtime.torch_internals import fx_trace


class UnrolledLoop:
    """The ops of a loop as one call: takes the loop's inputs, returns its output or the tuple of its outputs.

    Attributes:
        graph: the loop's ops.
        states: of ``graph``, the op that makes each step's state, in order.
        gather: of ``graph``, the op that puts a row of each step side by side.
    """

    def __init__(self, graph: Graph, states: tuple[Node, ...], gather: Node) -> None:
        self.graph = graph
        self.states = states
        self.gather = gather
        self._dtypes = [node.meta["val"].dtype for node in graph.nodes if node.op == "placeholder"]
        self._module = fx_trace.lazy_graph_module(torch.nn.Module(), graph, class_name="UnrolledLoop")
        self.__name__ = f"{LOOP_PREFIX}{len(states)}_steps_{_digest(graph)}"

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Run the loop; where a float input comes in float64, all of it in float64."""
        wide = torch.float64
        if any(tensor.dtype == wide != dtype for tensor, dtype in zip(tensors, self._dtypes, strict=True)):
            return _InFloat64(self._module).run(*(one.to(wide) if one.is_floating_point() else one for one in tensors))
        return self._module(*tensors)


class _InFloat64(torch.fx.Interpreter):
    """Runs a graph whose casts to float dtypes go to float64."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op."""
        return super().call_function(target, map_aggregate(args, _widened), map_aggregate(kwargs, _widened))


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def fold_loops(live: LiveCapture, least_steps: int = LEAST_STEPS, *, note: Callable[[str], None] = lambda _: None) -> int:
    """Replace each unrolled recurrence of a capture's graphs by one op, and return how many there were.

    Args:
        live: its graphs are changed.
        least_steps: shorter loops are left op by op.
        note: called with one sentence where there are any.
    """
    count = 0
    for region in live.regions:
        loops = find_recurrences(region.graph.graph, least_steps)
        for loop in loops:
            _fold(region.graph.graph, loop)
        if loops:
            region.graph.recompile()
        count += len(loops)
    if count:
        note(f"{count} unrolled {'loop' if count == 1 else 'loops'} over time, left as one op each")
    return count


def _fold(graph: Graph, loop: Recurrence) -> None:
    body = Graph()
    copies: dict[Node, Node] = {}
    for number, source in enumerate(loop.inputs):
        copies[source] = body.placeholder(f"given_{number}")
        copies[source].meta["val"] = source.meta["val"]
    for node in loop.members:
        copies[node] = body.node_copy(node, copies.__getitem__)
    results = tuple(copies[node] for node in loop.outputs)
    body.output(results if len(results) > 1 else results[0])
    gather = loop.outputs[0]
    values = [node.meta["val"] for node in loop.outputs]
    with graph.inserting_before(gather):
        one = UnrolledLoop(body, tuple(copies[state] for state in loop.states), copies[gather])
        call = graph.call_function(one, loop.inputs)
        origin = loop.states[0].meta
        call.meta = {key: origin[key] for key in ("nn_module_stack", "stack_trace") if key in origin}
        call.meta["results"] = values
        call.meta["val"] = tuple(values) if len(values) > 1 else values[0]
        made = [graph.call_function(operator.getitem, (call, number)) for number in range(len(values))] if values[1:] else [call]
    for node, result in zip(loop.outputs, made, strict=True):
        if result is not call:
            result.meta = {**{key: call.meta[key] for key in call.meta if key in origin}, "val": node.meta["val"]}
        node.replace_all_uses_with(result)
    for node in reversed(loop.members):
        graph.erase_node(node)


def _digest(graph: Graph) -> str:
    """Return a digest that is equal for loops of the same ops on the same layouts."""
    number = {node: place for place, node in enumerate(graph.nodes)}
    digest = hashlib.sha256()
    for node in graph.nodes:
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: number[source])
        value = node.meta["val"] if node.op == "placeholder" else None
        layout = "" if value is None else (tuple(value.shape), value.stride(), value.dtype)
        digest.update(f"{'' if node.op == 'placeholder' else node.target} {arguments} {layout}\n".encode())
    return digest.hexdigest()[:8]
