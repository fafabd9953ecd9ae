"""Retrace a dynamo graph with each distinct op traced once: a transformer's layers repeat the same sixty ops.

Tracing an op takes 0.7 ms of one CPU thread, in modes that each see it in turn; 28 layers of Qwen2.5 are 1,900 of them. What an
op becomes depends on its arguments alone: their layouts, which of them share memory, and the constants. So the first of each
kind is traced, and the others get copies of the ATen ops it became. The fake tensors are not computed a second time: dynamo has
made each op's result, and its layout and memory are compared with the traced one's.

Wherever that reasoning could fail (an op that changes a tensor's layout in place, state that is switched within the graph,
constants made in it, a result that differs from the one traced), ``retrace_distinct`` returns None: the whole graph is traced.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fusion_advisor.runtime import torch_internals

_ORIGIN = ("nn_module_stack", "stack_trace", "source_fn_stack")


@dataclass(frozen=True, slots=True)
class _Input:
    """A tensor that an op is given, by its number among them."""

    number: int


@dataclass(frozen=True, slots=True)
class _Made:
    """The result of an ATen op, by its number among those that one op became."""

    number: int


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor in an op's result, by its number among them."""

    number: int


@dataclass(frozen=True, slots=True)
class _Between:
    """A tensor between two of the ATen ops that one op became."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    lies_in: _Input | _Leaf | _Made | None
    """Whose memory it shares; None for its own."""


_Value = _Input | _Leaf | _Between


@dataclass(frozen=True, slots=True)
class _Op:
    """One ATen op, with references in place of nodes."""

    target: Callable[..., Any] | torch.Tensor
    """A tensor stands for itself: the empty one that ``torch.tensor([])`` is made from."""
    name: str
    args: Any
    kwargs: Any
    value: Any
    """A ``_Value``, or a tuple or list of them."""


@dataclass(frozen=True, slots=True)
class _Recipe:
    """The ATen ops that one op of dynamo's graph becomes.

    Attributes:
        ops: in order.
        leaves: where each tensor of its result comes from.
        layouts: of those tensors.
        lies_in: the number of the first input whose memory a tensor of the result shares; -1 for none.
        after: for each input, what stands for that tensor from then on: an op that writes in place takes its place.
    """

    ops: tuple[_Op, ...]
    leaves: tuple[_Input | _Made, ...]
    layouts: tuple[tuple[Any, ...], ...]
    lies_in: tuple[int, ...]
    after: tuple[_Input | _Made, ...]


class _Differs(Exception):
    """This graph cannot be put together from its distinct ops."""


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
    except _Differs:
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
        if node.op in ("placeholder", "output") or node.target is torch_internals.SAYS_ONLY:
            continue
        if node.op not in ("call_function", "call_method") or node.meta.get("example_value") is None:
            raise _Differs  # a module, or a switch: gradients, autocast
        inputs: dict[int, torch.Tensor] = {}
        code = (node.op, node.target, _code(node.args, inputs), _code(node.kwargs, inputs))
        tensors = tuple(inputs.values())
        for tensor in tensors:
            if id(tensor) not in layouts:
                layouts[id(tensor)] = _layout(tensor)
        shared = _shared(tensors) if len(tensors) > 1 else ()
        key = (code, tuple(layouts[id(tensor)] for tensor in tensors), shared)
        calls.append(_Call(node, key, tensors, tuple(_tensors(_example(node)))))
    return calls


def _code(value: Any, inputs: dict[int, torch.Tensor]) -> Any:
    """Turn an argument into what can be compared; tensors are noted in ``inputs`` and stand for their numbers there."""
    if isinstance(value, Node):
        return _code(value.meta.get("example_value", _Differs), inputs)
    if isinstance(value, torch.Tensor):
        if not torch_internals.is_plain_fake(value):
            raise _Differs
        inputs.setdefault(id(value), value)
        return _Input(list(inputs).index(id(value)))
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
    raise _Differs


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if not torch_internals.is_plain_fake(value):
            raise _Differs
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    if value is None or isinstance(value, bool | int | float | str):
        return []
    raise _Differs


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)


def _shared(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return, for each tensor, the number of the first that lies in the same storage."""
    keys = [torch_internals.storage_key(tensor) for tensor in tensors]
    return tuple(keys.index(key) for key in keys)


# ---------------------------------------------------------------------- the distinct ops, traced together


def _trace(calls: Sequence[_Call]) -> list[_Recipe]:
    given = [tensor for call in calls for tensor in call.inputs]
    graph = Graph()
    with torch.no_grad(), torch_internals.fake_mode_of(given):
        # The tracer distinguishes tensors by identity: a tensor that one op writes must not replace another op's input.
        fakes = [tensor.detach() for tensor in given]
    places = iter([graph.placeholder(f"given_{number}") for number in range(len(fakes))])
    returned = []
    for number, call in enumerate(calls):
        mine = {id(tensor): next(places) for tensor in call.inputs}
        args, kwargs = _mapped(call.node, _placing(mine))
        made = graph.create_node(call.node.op, call.node.target, args, kwargs)
        made.meta["stack_trace"] = str(number)  # which the tracer hands on to the ops that it makes of it
        returned.append((made, tuple(mine.values())))
    graph.output(tuple(returned))
    interpreter = torch.fx.Interpreter(GraphModule(torch.nn.Module(), graph))
    traced = torch_internals.retrace_to_aten(interpreter.run, fakes)
    return _recipes(traced, [len(call.inputs) for call in calls])


def _mapped(node: Node, find: Callable[[Node], Any]) -> Any:
    return map_arg((node.args, node.kwargs), find)


def _placing(places: Mapping[int, Node]) -> Callable[[Node], Any]:
    return lambda node: _placed(_example(node), places)


def _example(node: Node) -> Any:
    return node.meta["example_value"]


def _placed(value: Any, places: Mapping[int, Node]) -> Any:
    if isinstance(value, torch.Tensor):
        return places[id(value)]
    return type(value)([_placed(item, places) for item in value]) if isinstance(value, tuple | list) else value


def _recipes(traced: GraphModule, counts: Sequence[int]) -> list[_Recipe]:
    reference: dict[Node, _Input | _Made] = {}
    inputs: list[list[Node]] = [[] for _ in counts]
    owners = iter([number for number, count in enumerate(counts) for _ in range(count)])
    made: list[list[Node]] = [[] for _ in counts]
    returned: Sequence[Any] = ()
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            mine = inputs[next(owners)]
            reference[node] = _Input(len(mine))
            mine.append(node)
        elif node.op == "output":
            returned = node.args[0]
        else:
            _refuse_unusual(node, traced)
            ops = made[int(node.meta["stack_trace"])]
            reference[node] = _Made(len(ops))
            ops.append(node)
    return [_recipe(traced, ops, given, reference, *one) for ops, given, one in zip(made, inputs, returned, strict=True)]


def _refuse_unusual(node: Node, traced: GraphModule) -> None:
    is_plain = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.inplace_view not in node.target.tags
    is_call = node.op == "call_function" and (is_plain or node.target is operator.getitem or _detaches_a_constant(node))
    if not (is_call or _is_empty_constant(node, traced)) or "stack_trace" not in node.meta:
        raise _Differs
    if "val" not in node.meta:
        raise _Differs  # it returns nothing (`_foreach_add_`): its result does not show which tensors it writes


def _is_empty_constant(node: Node, traced: GraphModule) -> bool:
    """Whether a constant has no numbers, as the keys and values of a cache have before its first token."""
    return node.op == "get_attr" and getattr(traced, str(node.target)).numel() == 0


def _detaches_a_constant(node: Node) -> bool:
    """Whether an op is the last of the three that ``torch.tensor`` becomes: nobody has seen what it changes in place."""
    source = node.args[0] if node.target is torch.ops.aten.detach_.default else None
    return isinstance(source, Node) and source.target is torch.ops.aten.lift_fresh_copy.default and len(source.users) == 1


def _recipe(
    traced: GraphModule, made: Sequence[Node], given: Sequence[Node], reference: Mapping[Node, _Input | _Made], result: Any,
    after: Sequence[Node],
) -> _Recipe:  # fmt: skip
    leaves = _nodes(result)
    places = _storages(given)
    values = [leaf.meta["val"] for leaf in leaves]
    ops: list[_Op] = []
    for node in made:
        args, kwargs = _mapped(node, reference.__getitem__)
        items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        value = node.meta["val"]
        found: Any
        if isinstance(value, tuple | list):
            found = type(value)([_value(items.get(at), item, leaves, after, given, made) for at, item in enumerate(value)])
        else:
            found = _value(node, value, leaves, after, given, made)
        name = re.sub(r"_\d+$", "", node.name)
        target = getattr(traced, str(node.target)) if node.op == "get_attr" else node.target
        assert callable(target) or isinstance(target, torch.Tensor)
        ops.append(_Op(target, name, args, kwargs, found))
    return _Recipe(
        ops=tuple(ops),
        leaves=tuple(reference[leaf] for leaf in leaves),
        layouts=tuple(_layout(value) for value in values),
        lies_in=tuple(places.index(key) if (key := torch_internals.storage_key(value)) in places else -1 for value in values),
        after=tuple(reference[node] for node in after),
    )


def _nodes(result: Any) -> list[Node]:
    if isinstance(result, Node):
        return [result]
    return [node for item in result for node in _nodes(item)] if isinstance(result, tuple | list) else []


def _storages(nodes: Sequence[Node]) -> list[int]:
    return [torch_internals.storage_key(node.meta["val"]) for node in nodes]


def _value(
    node: Node | None, value: Any, leaves: Sequence[Node], after: Sequence[Node], given: Sequence[Node], made: Sequence[Node]
) -> _Value:
    """Say which of the fake tensors at hand an ATen op's result is, or how to make it."""
    if not isinstance(value, torch.Tensor):
        raise _Differs
    if node in leaves:
        return _Leaf(leaves.index(node))
    if node in after:
        return _Input(after.index(node))
    key = torch_internals.storage_key(value)
    lies_in: _Input | _Leaf | _Made | None = None
    dtype = value.dtype
    for kind, nodes in ((_Input, given), (_Leaf, leaves)):
        places = _storages(nodes)
        if lies_in is None and key in places:
            lies_in, dtype = kind(places.index(key)), nodes[places.index(key)].meta["val"].dtype
    earlier = [one for one in made if one is not node and isinstance(one.meta["val"], torch.Tensor)]
    if dtype != value.dtype or (lies_in is None and key in _storages(earlier)):
        raise _Differs  # never seen: a view of memory that neither comes in nor goes out
    return _Between(tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype, value.device, lies_in)


# ---------------------------------------------------------------------- all ops again, from their recipes


def _put_together(graph_module: GraphModule, calls: Sequence[_Call], recipes: Mapping[Any, _Recipe]) -> GraphModule:
    graph, constants = Graph(), torch.nn.Module()
    now: dict[int, Node] = {}  # a fake tensor's id -> the node that stands for it
    sources = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad(), torch_internals.fake_mode_of([_example(node) for node in sources]):
        for number, source in enumerate(sources):
            value = _example(source)
            node = graph.placeholder(f"arg{number}_1")
            if isinstance(value, torch.Tensor):
                node.meta["val"] = torch_internals.detached_fake(value)
                now[id(value)] = node
        for call in calls:
            _add(graph, constants, call, recipes[call.key], now)
    (result,) = next(node for node in graph_module.graph.nodes if node.op == "output").args
    graph.output(map_arg(result, _placing(now)))
    return torch_internals.lazy_graph_module(constants, graph, class_name="Region")


def _add(graph: Graph, constants: torch.nn.Module, call: _Call, recipe: _Recipe, now: dict[int, Node]) -> None:
    _compare(call, recipe)
    origin = {name: call.node.meta[name] for name in _ORIGIN if name in call.node.meta}
    given = [now[id(tensor)] for tensor in call.inputs]
    made: list[Node] = []

    def find(reference: Any) -> Any:
        if isinstance(reference, _Input):
            return given[reference.number]
        return made[reference.number] if isinstance(reference, _Made) else reference

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


def _compare(call: _Call, recipe: _Recipe) -> None:
    """Refuse a result of dynamo's that is not the traced one: another layout, other memory, or an input where none was."""
    if tuple(map(_layout, call.results)) != recipe.layouts:
        raise _Differs
    ids = [id(tensor) for tensor in call.inputs]
    keys = [torch_internals.storage_key(tensor) for tensor in call.inputs]
    for tensor, leaf, place in zip(call.results, recipe.leaves, recipe.lies_in, strict=True):
        key = torch_internals.storage_key(tensor)
        same = recipe.after.index(leaf) if leaf in recipe.after else -1
        if (ids.index(id(tensor)) if id(tensor) in ids else -1) != same or (keys.index(key) if key in keys else -1) != place:
            raise _Differs


def _replaced(value: Any, find: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple | list):
        return type(value)([_replaced(item, find) for item in value])
    if isinstance(value, dict):
        return {name: _replaced(item, find) for name, item in value.items()}
    return find(value)


def _fake(value: _Value, call: _Call) -> torch.Tensor:
    if isinstance(value, _Leaf):
        return call.results[value.number]
    if isinstance(value, _Input):
        return call.inputs[value.number]
    if value.lies_in is None:
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device)
    inside = _fake(value.lies_in, call) if not isinstance(value.lies_in, _Made) else None
    assert inside is not None
    return inside.as_strided(value.shape, value.stride, value.offset)
