"""Autocast: the casts that it makes within a dynamo graph, written out as ops.

Under autocast the same op means another one: ``linear`` of float32 tensors computes in bfloat16. Tracing above the dispatcher
notes the op and misses the casts, so that every dtype after it is wrong. With the casts as ops of the graph, nothing that reads
or rewrites it needs to know of autocast.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fusion_advisor.runtime.torch_internals.dispatcher import OpLog
from fusion_advisor.runtime.torch_internals.fake_mode import fake_mode_of, is_fake

_ORIGIN = ("nn_module_stack", "stack_trace", "source_fn_stack")
_CASTS = ("aten._to_copy.default", "aten.to.dtype")
_IDLE = (
    "prim.", "aten.view.", "aten._unsafe_view.", "aten.permute.", "aten.t.", "aten.transpose.", "aten.unsqueeze.",
    "aten.squeeze.", "aten.expand.", "aten.select.", "aten.slice.", "aten.as_strided.", "aten.alias.", "aten.detach.",
    "aten.unbind.", "aten.split",
)  # fmt: skip
"""Ops that compute nothing: they ask a tensor for its device, or view it, before a cast or after it."""
_KINDS = ("cpu", "cuda")


class NotFollowed(Exception):
    """What autocast makes of an op cannot be said by casts of its arguments; the text names the op."""


def with_casts(graph_module: GraphModule) -> GraphModule:
    """Return a dynamo graph with autocast's casts as ops and without its switches; the graph itself where it turns none on.

    Each op between the switches runs on fake tensors, with autocast and without. Where the ops that reach a backend differ, its
    floating-point arguments are cast: to autocast's dtype, to float32, or to the widest among them, whichever gives the ops that
    autocast gives.

    Args:
        graph_module: dynamo's, with the fake tensors that it was traced on (``example_value``); it is not changed.

    Raises:
        NotFollowed: none of the three does.
    """
    nodes = graph_module.graph.nodes
    is_around = any(map(torch.is_autocast_enabled, _KINDS))
    if is_around or not any(node.target is _enter_autocast and node.args[2] for node in nodes):
        return graph_module
    graph = Graph()
    copies: dict[Node, Node] = {}
    entered: list[Node] = []
    for node in nodes:
        if node.target is _enter_autocast:
            entered.append(node)
        elif node.target is _exit_autocast:
            entered.remove(node.args[0])
        else:
            wanted = _wanted_dtypes(node, {str(one.args[0]): one for one in entered})
            casts = {source: _cast(graph, copies[source], dtype, node) for source, dtype in wanted.items()}
            copies[node] = graph.node_copy(node, ((copies | casts) if casts else copies).__getitem__)
    return GraphModule(graph_module, graph)


def _cast(graph: Graph, source: Node, dtype: torch.dtype, reader: Node) -> Node:
    cast = graph.call_method("to", (source, dtype))
    value = source.meta["example_value"]
    with torch.no_grad(), fake_mode_of([value]):
        cast.meta = {"example_value": value.to(dtype)} | {name: reader.meta[name] for name in _ORIGIN if name in reader.meta}
    return cast


def _wanted_dtypes(node: Node, modes: Mapping[str, Node]) -> dict[Node, torch.dtype]:
    """Return the arguments that autocast casts, with the dtype of each.

    Args:
        node: of dynamo's graph.
        modes: for each kind of device the node that entered its innermost autocast.
    """
    is_on = {kind: mode for kind, mode in modes.items() if mode.args[2]}
    floats = [source for source in node.all_input_nodes if _is_cast(source.meta.get("example_value"), is_on)]
    if not floats:
        return {}
    if node.op not in ("call_function", "call_method"):
        return {}  # the output, or a module that dynamo left whole and that casts by itself
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        raise NotFollowed(f"`{node.name}` lies in torch.autocast: the casts in it are not followed")
    under = _ops_of(node, {}, modes)
    given = {source: source.meta["example_value"].dtype for source in floats}
    kind, mode = next(iter(is_on.items()))
    asked = _dtype(mode) or torch.get_autocast_dtype(kind)
    widest = functools.reduce(torch.promote_types, given.values())
    for dtype in (None, asked, torch.float32, widest):
        casts = {source: dtype for source, before in given.items() if dtype is not None and dtype != before}
        with contextlib.suppress(RuntimeError):  # arguments of several dtypes, which only a cast makes one
            if _ops_of(node, casts, {}) == under:
                return casts
    raise NotFollowed(f"`{node.name}` lies in torch.autocast, which does more to it than cast its arguments")


def _dtype(mode: Node) -> torch.dtype | None:
    """Return the dtype that a node enters autocast with; None is the default of its kind of device."""
    dtype = mode.args[1]
    return dtype if isinstance(dtype, torch.dtype) else None


def _is_cast(value: Any, modes: Mapping[str, Node]) -> bool:
    """Whether autocast may cast a value: a float tensor of up to 32 bits on a device that it is on for."""
    is_float = is_fake(value) and value.is_floating_point() and value.dtype != torch.float64
    return is_float and value.device.type in modes


def _ops_of(node: Node, casts: Mapping[Node, torch.dtype], modes: Mapping[str, Node]) -> list[tuple[str, Any]]:
    """Return the ops that reach a backend, each with its result's dtypes; casts are left out."""
    values: list[Any] = []

    def value_of(source: Node) -> Any:
        value = source.meta.get("example_value")
        if not isinstance(value, torch.Tensor):
            return value
        values.append(value)
        return value.to(casts[source]) if source in casts else value.detach()  # an op in place may give it another layout

    fakes = [source.meta.get("example_value") for source in node.all_input_nodes]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(fake_mode_of([value for value in fakes if is_fake(value)]))
        args, kwargs = map_arg((node.args, node.kwargs), value_of)
        for kind, mode in modes.items():
            stack.enter_context(torch.autocast(kind, dtype=_dtype(mode), enabled=bool(mode.args[2]), cache_enabled=False))
        log = stack.enter_context(OpLog())
        result = _call(node)(*args, **kwargs)
    seen = ((name, value) for name, value in log.seen if name not in _CASTS and not name.startswith(_IDLE))
    return [(name, _dtypes(value)) for name, value in (*seen, ("result", result))]


def _call(node: Node) -> Callable[..., Any]:
    if node.op == "call_method":
        return lambda value, *args, **kwargs: getattr(value, str(node.target))(*args, **kwargs)
    assert callable(node.target)
    return node.target


def _dtypes(value: Any) -> tuple[Any, ...]:
    leaves = pytree.tree_leaves(value)
    return tuple((leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves)
