"""Retracing into ATen ops, and what the trace must be mended in before anything reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.channels_last import lay_channels_last
from fusion_advisor.capture.graph.contiguous_rows import lay_masks_out, lay_rows_out
from fusion_advisor.capture.graph.dedupe import retrace_distinct
from fusion_advisor.capture.graph.func_transforms import without_checkpoints, without_transforms
from fusion_advisor.capture.graph.functional_form import pad_by_numbers, put_numbers_in, write_out_of_place
from fusion_advisor.capture.graph.fx_nodes import (
    drops_nothing,
    is_idle_dropout,
    relative_path,
    source_of,
    storages,
    tensors_of,
    written_storages,
)
from fusion_advisor.capture.graph.outer_product import multiply_outer_products
from fusion_advisor.capture.graph.split_bias import is_slower_with_bias, split_bias
from fusion_advisor.runtime.torch_internals import aten_ops, autocast, dynamo, fake_mode, fx_trace, symbolic_sizes

_aten = torch.ops.aten


def trace(function: Callable[..., Any], example_inputs: Iterable[Any]) -> GraphModule:
    """Trace a plain function (a kernel's reference) into the same ATen ops as a model."""
    traced = fx_trace.retrace_to_aten(function, fake_mode.fake_tensors(list(example_inputs)))
    give_results_of_eager(traced)
    return traced


def retrace(graph_module: GraphModule) -> GraphModule:
    """Retrace a dynamo graph into ATen ops that keep their module paths and source lines; see also ``split_bias``."""
    plain = fx_trace.with_data_detached(without_checkpoints(graph_module))
    graph_module = without_transforms(autocast.with_casts(plain))
    traced = retrace_distinct(graph_module)
    if traced is None:
        interpreter = torch.fx.Interpreter(graph_module)
        traced = fx_trace.retrace_to_aten(interpreter.run, dynamo.placeholder_values(graph_module))
    _refuse_untraced(traced)
    give_results_of_eager(traced)
    _change_no_layout_in_place(traced)
    multiply_outer_products(traced)
    put_numbers_in(traced)
    pad_by_numbers(traced)
    write_out_of_place(traced)
    values = dynamo.placeholder_values(graph_module)
    if not any(symbolic_sizes.is_symbolic(value) for value in values):  # they compare sizes
        lay_rows_out(traced)
        lay_channels_last(traced)
        lay_masks_out(traced, parameter_names(traced, values))
        split_bias(traced, aten_ops.adds_bias_after_convolution, is_slower_with_bias)
    return traced


def parameter_names(traced: GraphModule, values: Iterable[Any]) -> list[str]:
    """Return the names of a graph's placeholders that are parameters.

    Args:
        traced: whose placeholders name nothing but their position.
        values: what dynamo traced each with.
    """
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    named = zip(placeholders, values, strict=True)
    return [node.name for node, value in named if isinstance(value, torch.nn.Parameter)]


_LAYOUT_IN_PLACE: dict[Any, Any] = {
    _aten.t_.default: _aten.t.default,
    _aten.transpose_.default: _aten.transpose.int,
    _aten.swapaxes_.default: _aten.transpose.int,
    _aten.swapdims_.default: _aten.transpose.int,
    _aten.as_strided_.default: _aten.as_strided.default,
    _aten.unsqueeze_.default: _aten.unsqueeze.default,
    _aten.squeeze_.default: _aten.squeeze.default,
    _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims,
    _aten.detach_.default: _aten.detach.default,
}
"""Ops that write no memory but give a tensor other sizes and strides, or no gradient, and the views that say the same."""


_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


class NotTraced(Exception):
    """A graph reads what tracing computed without a trace of how; the text says where."""


def _refuse_untraced(graph_module: GraphModule) -> None:
    """Refuse a graph with tensors of another kind than its ops say.

    What was computed under a transform of torch.func was taken for constants, which have no numbers. A quantized tensor was taken
    for the floats that it stands for. What no output and no write comes from may stay.

    Raises:
        NotTraced: with the line that reads or makes one.
    """
    needed: set[Node] = set()
    for node in reversed(graph_module.graph.nodes):
        if node.op == "output" or node in needed or written_storages(node):
            needed.update(node.all_input_nodes)
    for node in graph_module.graph.nodes:
        if node in needed and node.op == "get_attr" and fake_mode.has_no_numbers(getattr(graph_module, str(node.target), None)):
            reader = next(user for user in node.users if user.op == "output" or user in needed or written_storages(user))
            raise _not_traced(reader, "reads what a transform of torch.func computes: tracing does not follow it")
        if node in needed and any(isinstance(value, torch.dtype) and value in _QUANTIZED for value in node.args):
            raise _not_traced(node, "makes a quantized tensor: tracing takes it for floats")


def _not_traced(node: Node, detail: str) -> NotTraced:
    file, line, _ = source_of(node)
    return NotTraced(f"`{node.name}`{f' ({file}:{line})' if file else ''} {detail}")


def give_results_of_eager(graph_module: GraphModule) -> None:
    """Correct the fake tensors of ops that torch's differ from eager in, and recompute ops that used these or their strides.

    A dropout that drops nothing returns its input in eager, so what is written to the one is written to the other. Torch's fake
    result is a copy, and without the gaps that the input's strides may have. One in place writes nothing either: it is the same
    op. Reshapes: see ``fake_mode.laid_as_in_eager``.
    """
    left: set[int] = set()
    relaid: set[Node] = set()
    for node in graph_module.graph.nodes:
        if node.target is _aten.dropout_.default and drops_nothing(node):
            node.target = _aten.dropout.default
        before = tensors_of(node.meta.get("val"))
        if node.op != "call_function" or not before:
            continue
        if is_idle_dropout(node) and "val" in node.all_input_nodes[0].meta:
            value = node.all_input_nodes[0].meta["val"]
        elif not left.isdisjoint(storages(node)) or not relaid.isdisjoint(node.all_input_nodes):
            value = fake_mode.fake_result(graph_module, node)
        else:
            given = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
            value = fake_mode.laid_as_in_eager(node, node.meta["val"], *given)
            if value is node.meta["val"]:
                continue
        memory = set(storages(node))
        node.meta["val"] = value
        left |= memory - set(storages(node))
        if any(one.stride() != other.stride() for one, other in zip(before, tensors_of(value), strict=True)):
            relaid.add(node)


def _change_no_layout_in_place(graph_module: GraphModule) -> None:
    """Let a value keep the layout it was made with: what reads it by its storage would find another one after ``unsqueeze_``.

    The tracer has every later reader name the op's own result, so a view does as well. A tensor that the region was given is left
    alone: the caller may look at it.
    """
    given = {key for node in graph_module.graph.nodes if node.op == "placeholder" for key in storages(node)}
    for node in graph_module.graph.nodes:
        if node.target in _LAYOUT_IN_PLACE and given.isdisjoint(storages(node)):
            node.target = _LAYOUT_IN_PLACE[node.target]
    graph_module.recompile()


def tracing_cause(error: Exception) -> str:
    """Say in one line why tracing a graph stopped, and at which op where the interpreter has noted it.

    Args:
        error: what stopped it.
    """
    text = str(error).strip() or type(error).__name__
    if "Encountered a set_ on a graph input" in text:
        return "its forward gives a parameter other memory (`p.data = …`): write the numbers in place (`p.data.copy_(…)`)"
    at = re.search(r"While executing %(\w+)", text)
    where = f" `{at[1]}`" if at else ""
    return f"tracing{where} ended with {type(error).__name__}: {text.splitlines()[0]}"


def dynamos_cause(text: str) -> str:
    """Say in one line what dynamo says in twenty: its headline, its explanation, and the last line of the user's code.

    Args:
        text: of an error of dynamo's.
    """
    lines = [line.strip() for line in text.strip().splitlines()]
    explanation = next((line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")), "")
    places = re.findall(r'File "([^"]+)", line (\d+), in', text.partition("from user code:")[2])
    where = f" ({relative_path(places[-1][0])}:{places[-1][1]})" if places else ""
    return f"{lines[0]}{': ' if explanation else ''}{explanation}{where}"
