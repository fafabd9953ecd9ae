"""Retrace a dynamo graph with each distinct op traced once: a transformer's layers repeat the same sixty ops.

Tracing an op takes 0.7 ms of one CPU thread, in modes that each see it in turn; 28 layers of Qwen2.5 are 1,900 of them. What an
op becomes depends on its arguments alone: their layouts, which of them share memory, and the constants. So the first of each
kind is traced, and the others get copies of the ATen ops it became. The fake tensors are not computed a second time: dynamo has
made each op's result, and its layout and memory are compared with the traced one's.

Wherever that reasoning could fail (an op that changes a tensor's layout in place, state that is switched within the graph,
constants made in it, a result that differs from the one traced), ``retrace_distinct`` returns None: the whole graph is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fusion_advisor.capture.graph.op_recipe import Differs, Input, Leaf, Made, Recipe, Value, layout_of, mapped, recipes_of
from fusion_advisor.runtime.torch_internals import aten_ops, fake_mode, fx_trace, tensor_memory

_ORIGIN = ("nn_module_stack", "stack_trace", "source_fn_stack")


def retrace_distinct(graph_module: GraphModule) -> GraphModule | None:
    """Retrace dynamo's graph into the ATen ops that tracing all of it gives; None where only that can tell.

    Args:
        graph_module: dynamo's, with the fake tensors that it was traced on.
    """
    try:
        calls = _read_calls(graph_module)
        firsts: dict[Any, _Call] = {}
        for call in calls:
            firsts.setdefault(call.key, call)
        recipes = dict(zip(firsts, _trace(list(firsts.values())), strict=True))
        return _put_together(graph_module, calls, recipes)
    except Differs:
        return None


@dataclass(frozen=True, slots=True)
class _Call:
    """One op of dynamo's graph.

    Attributes:
        key: equal for ops that become the same ATen ops.
        inputs: the fake tensors that it is given, each once.
        results: the fake tensors in its result.
    """

    node: Node
    key: Any
    inputs: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]


def _read_calls(graph_module: GraphModule) -> list[_Call]:
    calls = []
    layouts: dict[int, tuple[Any, ...]] = {}
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "output") or node.target is aten_ops.SAYS_ONLY:
            continue
        if node.op not in ("call_function", "call_method") or node.meta.get("example_value") is None:
            raise Differs  # a module, or a switch: gradients, autocast
        inputs: dict[int, torch.Tensor] = {}
        code = (node.op, node.target, _code(node.args, inputs), _code(node.kwargs, inputs))
        tensors = tuple(inputs.values())
        for tensor in tensors:
            if id(tensor) not in layouts:
                layouts[id(tensor)] = layout_of(tensor)
        shared = _shared(tensors) if len(tensors) > 1 else ()
        key = (code, tuple(layouts[id(tensor)] for tensor in tensors), shared)
        calls.append(_Call(node, key, tensors, tuple(_tensors(_example(node)))))
    return calls


def _code(value: Any, inputs: dict[int, torch.Tensor]) -> Any:
    """Turn an argument into what can be compared; tensors are noted in ``inputs`` and stand for their numbers there."""
    if isinstance(value, Node):
        return _code(value.meta.get("example_value", Differs), inputs)
    if isinstance(value, torch.Tensor):
        if not fake_mode.is_plain_fake(value):
            raise Differs
        inputs.setdefault(id(value), value)
        return Input(list(inputs).index(id(value)))
    if isinstance(value, tuple | list):
        return (type(value), *[_code(item, inputs) for item in value])
    if isinstance(value, dict):
        return (dict, *[(name, _code(item, inputs)) for name, item in value.items()])
    if isinstance(value, slice):
        return (slice, *[_code(item, inputs) for item in (value.start, value.stop, value.step)])
    if (
        value is None
        or value is Ellipsis
        or isinstance(value, bool | int | str | torch.dtype | torch.device | torch.memory_format)
    ):
        return (type(value), value)
    if isinstance(value, float):
        return (float, repr(value))  # 0.0 and -0.0 are equal
    raise Differs


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if not fake_mode.is_plain_fake(value):
            raise Differs
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    if value is None or isinstance(value, bool | int | float | str):
        return []
    raise Differs


def _shared(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return, for each tensor, the number of the first that lies in the same storage."""
    keys = [tensor_memory.storage_key(tensor) for tensor in tensors]
    return tuple(keys.index(key) for key in keys)


# ---------------------------------------------------------------------- the distinct ops, traced together


def _trace(calls: Sequence[_Call]) -> list[Recipe]:
    given = [tensor for call in calls for tensor in call.inputs]
    graph = Graph()
    with torch.no_grad(), fake_mode.fake_mode_of(given):
        # The tracer distinguishes tensors by identity: a tensor that one op writes must not replace another op's input.
        fakes = [tensor.detach() for tensor in given]
    places = iter([graph.placeholder(f"given_{number}") for number in range(len(fakes))])
    returned = []
    for number, call in enumerate(calls):
        mine = {id(tensor): next(places) for tensor in call.inputs}
        args, kwargs = mapped(call.node, _placing(mine))
        made = graph.create_node(call.node.op, call.node.target, args, kwargs)
        made.meta["stack_trace"] = str(number)  # which the tracer hands on to the ops that it makes of it
        returned.append((made, tuple(mine.values())))
    graph.output(tuple(returned))
    interpreter = torch.fx.Interpreter(GraphModule(torch.nn.Module(), graph))
    traced = fx_trace.retrace_to_aten(interpreter.run, fakes)
    return recipes_of(traced, [len(call.inputs) for call in calls])


def _placing(places: Mapping[int, Node]) -> Callable[[Node], Any]:
    return lambda node: _placed(_example(node), places)


def _example(node: Node) -> Any:
    return node.meta["example_value"]


def _placed(value: Any, places: Mapping[int, Node]) -> Any:
    if isinstance(value, torch.Tensor):
        return places[id(value)]
    return type(value)([_placed(item, places) for item in value]) if isinstance(value, tuple | list) else value


# ---------------------------------------------------------------------- all ops again, from their recipes


def _put_together(graph_module: GraphModule, calls: Sequence[_Call], recipes: Mapping[Any, Recipe]) -> GraphModule:
    graph, constants = Graph(), torch.nn.Module()
    now: dict[int, Node] = {}  # a fake tensor's id -> the node that stands for it
    sources = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad(), fake_mode.fake_mode_of([_example(node) for node in sources]):
        for number, source in enumerate(sources):
            value = _example(source)
            node = graph.placeholder(f"arg{number}_1")
            if isinstance(value, torch.Tensor):
                node.meta["val"] = fake_mode.detached_fake(value)
                now[id(value)] = node
        for call in calls:
            _add(graph, constants, call, recipes[call.key], now)
    (result,) = next(node for node in graph_module.graph.nodes if node.op == "output").args
    graph.output(map_arg(result, _placing(now)))
    return fx_trace.lazy_graph_module(constants, graph, class_name="Region")


def _add(graph: Graph, constants: torch.nn.Module, call: _Call, recipe: Recipe, now: dict[int, Node]) -> None:
    _compare(call, recipe)
    origin = {name: call.node.meta[name] for name in _ORIGIN if name in call.node.meta}
    given = [now[id(tensor)] for tensor in call.inputs]
    made: list[Node] = []

    def find(reference: Any) -> Any:
        if isinstance(reference, Input):
            return given[reference.number]
        return made[reference.number] if isinstance(reference, Made) else reference

    for op in recipe.ops:
        if isinstance(op.target, torch.Tensor):
            name = f"_tensor_constant{len(list(constants.buffers()))}"
            constants.register_buffer(name, op.target)
            node = graph.create_node("get_attr", name)
        else:
            node = graph.create_node("call_function", op.target, _replaced(op.args, find), _replaced(op.kwargs, find), op.name)
        is_many = isinstance(op.value, tuple | list)
        value = type(op.value)([_fake(one, call) for one in op.value]) if is_many else _fake(op.value, call)
        node.meta = {**origin, "val": value}
        made.append(node)
    for tensor, reference in zip(call.inputs, recipe.after, strict=True):
        now[id(tensor)] = find(reference)
    for tensor, reference in zip(call.results, recipe.leaves, strict=True):
        now[id(tensor)] = find(reference)


def _compare(call: _Call, recipe: Recipe) -> None:
    """Refuse a result of dynamo's that is not the traced one: another layout, other memory, or an input where none was."""
    if tuple(map(layout_of, call.results)) != recipe.layouts:
        raise Differs
    ids = [id(tensor) for tensor in call.inputs]
    keys = [tensor_memory.storage_key(tensor) for tensor in call.inputs]
    for tensor, leaf, place in zip(call.results, recipe.leaves, recipe.lies_in, strict=True):
        key = tensor_memory.storage_key(tensor)
        same = recipe.after.index(leaf) if leaf in recipe.after else -1
        if (ids.index(id(tensor)) if id(tensor) in ids else -1) != same or (keys.index(key) if key in keys else -1) != place:
            raise Differs


def _replaced(value: Any, find: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple | list):
        return type(value)([_replaced(item, find) for item in value])
    if isinstance(value, dict):
        return {name: _replaced(item, find) for name, item in value.items()}
    return find(value)


def _fake(value: Value, call: _Call) -> torch.Tensor:
    if isinstance(value, Leaf):
        return call.results[value.number]
    if isinstance(value, Input):
        return call.inputs[value.number]
    if value.lies_in is None:
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device)
    inside = _fake(value.lies_in, call) if not isinstance(value.lies_in, Made) else None
    assert inside is not None
    return inside.as_strided(value.shape, value.stride, value.offset)
