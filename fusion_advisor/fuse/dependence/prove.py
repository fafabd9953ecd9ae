"""Walks a captured graph and says what stands in the way of padding one of its sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx import Node

from fusion_advisor.capture.graph.fx_nodes import draws_numbers
from fusion_advisor.capture.sizes.open_capture import OpenCapture, base_of
from fusion_advisor.fuse.cuda_graph.capturable import place_of
from fusion_advisor.fuse.dependence import creation, places, pointwise, products, reductions, views
from fusion_advisor.fuse.dependence.call import Call, Padded, Ruled, State, fixed, leaves
from fusion_advisor.fuse.dependence.kept import Kept, Long, Sign, Span, Stops, Where
from fusion_advisor.runtime.torch_internals import symbolic_sizes

_RULES: Mapping[str, Ruled] = {
    **pointwise.RULES, **views.RULES, **reductions.RULES, **products.RULES, **places.RULES, **creation.RULES,
}  # fmt: skip


_UNFORESEEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, StopIteration)
"""Of a rule that meets arguments which it does not know: what is not proved is not padded, and ends no run."""


def why_padding_counts(opened: OpenCapture, name: str, zeroed: Collection[int] = ()) -> str:
    """Say which op lets padding change a result; empty where it is proved that none does, whatever the inputs hold.

    Args:
        opened: the graph, of any values.
        name: of the size that is padded.
        zeroed: places of the inputs that are padded with zeros; the others repeat what is at their end.
    """
    padded = _padded(opened, name)
    states: dict[Node, State] = {}
    inputs = [node for node in opened.region.graph.graph.nodes if node.op == "placeholder"]
    for slot, node in enumerate(inputs):
        role = opened.region.roles[slot] if slot < len(opened.region.roles) else "input"
        if isinstance(node.meta.get("val"), torch.Tensor):
            states[node] = _given(padded, node.meta["val"], is_call=role == "input", is_zeroed=slot in zeroed)
    for node in opened.region.graph.graph.nodes:
        if node.op == "get_attr":
            states[node] = _constant(opened, node)
        elif node.op == "call_function":
            if _writes(node):
                return _text("writes in place", node)
            found = _stated(padded, node, states)
            if found is not None:
                states[node] = found
        elif node.op == "output":
            return _why_not_given(padded, node, states)
    return "its graph has no results"


def _padded(opened: OpenCapture, name: str) -> Padded:
    symbols = [symbol for symbol, dim in opened.names.items() if base_of(dim) == name]
    # A call has one size of each name, whichever of its tensors tells it.
    named: dict[str, Any] = {}
    replaced = {symbol: named.setdefault(dim, symbol) for symbol, dim in opened.names.items()}
    replaced = {symbol: first for symbol, first in replaced.items() if symbol is not first}
    return Padded(
        name=name, symbols=frozenset(symbols), others=frozenset(opened.names).difference(symbols),
        replaced={**symbolic_sizes.equalities_of(opened.guards), **replaced},
    )  # fmt: skip


def _given(padded: Padded, value: torch.Tensor, *, is_call: bool, is_zeroed: bool) -> Kept:
    axes = tuple(padded.factors(size) for size in value.shape)
    count = len(Kept(axes=axes).places)
    zeros = {Where(None, ordinal): False if value.dtype == torch.bool else 0 for ordinal in range(count)} if is_zeroed else {}
    return Kept(
        axes=axes, facts=zeros, span=Span.FINITE, sign=Sign.NOT_NEGATIVE if value.dtype == torch.bool else Sign.ANY,
        is_copied=not zeros, is_free=not is_call,
    )  # fmt: skip


def _constant(opened: OpenCapture, node: Node) -> State:
    value: Any = opened.region.graph
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    if not isinstance(value, torch.Tensor):
        return Stops("takes a value that no rule is for")
    axes = tuple(() if size == 1 else (int(size),) for size in value.shape)
    number = value.item() if value.numel() == 1 and not value.is_complex() else None
    span = Span.FINITE if bool(torch.isfinite(value).all()) else Span.ANY
    return Kept(axes=axes, fill=number, span=span, is_copied=True, is_free=True)


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _stated(padded: Padded, node: Node, states: dict[Node, State]) -> State | None:
    """Return what is known of an op's result; None where it is a size."""
    if getattr(node.target, "__name__", "") == "getitem":
        source = states.get(node.args[0]) if isinstance(node.args[0], Node) else None
        at = node.args[1]
        return source[at] if isinstance(source, list) and isinstance(at, int) else source
    value = node.meta.get("val")
    if symbolic_sizes.is_size(value) or isinstance(value, bool | int | float):
        return None if not _reads_values(node) else Stops(_text("reads a number off a tensor", node), is_placed=True)
    try:
        return _ruled(padded, node, states)
    except Stops as stop:
        return stop if stop.is_placed else Stops(_text(str(stop), node), is_placed=True)
    except _UNFORESEEN:
        return Stops(_text("calls an op in a form that no rule covers", node), is_placed=True)


def _reads_values(node: Node) -> bool:
    """Whether a number is computed from elements: it is not where it is a tensor's size."""
    if "sym_" in str(node.target) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return any(isinstance(one.meta.get("val"), torch.Tensor) for one in node.all_input_nodes)


def _ruled(padded: Padded, node: Node, states: Mapping[Node, State]) -> Kept | list[Kept]:
    if draws_numbers(node):
        raise Stops("draws random numbers")
    if not isinstance(node.target, torch._ops.OpOverload):
        raise Stops("calls an op that no rule is for")
    name = node.target._schema.name.partition("::")[2]
    ruled = _RULES.get(name) if node.target.namespace == "aten" else None
    call = Call(node, name, padded, states, _bound(node))
    _stop_at_numbers(call, () if ruled is None else ruled.sizes)
    operands = [] if ruled is not None and ruled.reads_shapes_alone else [
        call.state(one) for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)
    ]  # fmt: skip
    is_fixed = not any(isinstance(f, Long) for one in operands for dim in one.axes for f in dim) and not any(
        padded.grows(padded.written(size)) for one in call.values if isinstance(one, torch.Tensor) for size in one.shape
    )
    try:
        if ruled is None:
            raise Stops("calls an op that no rule is for")
        return ruled.rule(call)
    except Stops:
        if not is_fixed:
            raise
    found = [fixed(call, operands, one) for one in call.values]
    return found if isinstance(node.meta.get("val"), tuple | list) else found[0]


def _bound(node: Node) -> dict[str, Any]:
    """Return an op's arguments by name, those that are left out too."""
    assert isinstance(node.target, torch._ops.OpOverload)
    found: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(node.args):
            found[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            found[argument.name] = node.kwargs[argument.name]
        else:
            found[argument.name] = argument.default_value if argument.has_default_value() else None
    return found


def _stop_at_numbers(call: Call, sizes: Collection[str]) -> None:
    """Stop where the padded size is a number that is computed with."""
    for argument, value in call.given.items():
        for leaf in leaves(value):
            number = leaf.meta.get("val") if isinstance(leaf, Node) else leaf
            if not symbolic_sizes.symbols_under(number) <= call.padded.others and argument not in sizes:
                raise Stops(f"takes `{call.padded.name}` for a number")


def _why_not_given(padded: Padded, node: Node, states: Mapping[Node, State]) -> str:
    for result in leaves(list(node.args)):
        if not isinstance(result, Node):
            continue
        found = states.get(result)
        if isinstance(found, Stops):
            return str(found)
        value = result.meta.get("val")
        if not isinstance(value, torch.Tensor):
            if symbolic_sizes.is_size(value):
                return "a result is a size"
            continue
        if not isinstance(found, Kept):
            return _text("gives a result that no rule is for", result)
        if found.fill is None and found.axes and any(len(own) > 1 for n, own in enumerate(found.axes) if found.is_long(n)):
            return f"a result has a dim in which `{padded.name}` and others are flattened"
    return ""


def _text(what: str, node: Node) -> str:
    return f"the model {what}, in {place_of(node)}"
