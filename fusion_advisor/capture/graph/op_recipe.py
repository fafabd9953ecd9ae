"""Recipes: the ATen ops that one op of dynamo's graph becomes, written so that they can be repeated for other tensors."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fusion_advisor.runtime.torch_internals import tensor_memory


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that an op is given, by its number among them."""

    number: int


@dataclass(frozen=True, slots=True)
class Made:
    """The result of an ATen op, by its number among those that one op became."""

    number: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor in an op's result, by its number among them."""

    number: int


@dataclass(frozen=True, slots=True)
class Between:
    """A tensor between two of the ATen ops that one op became."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    lies_in: Input | Leaf | Made | None
    """Whose memory it shares; None for its own."""


Value = Input | Leaf | Between


@dataclass(frozen=True, slots=True)
class Op:
    """One ATen op, with references in place of nodes."""

    target: Callable[..., Any] | torch.Tensor
    """A tensor stands for itself: the empty one that ``torch.tensor([])`` is made from."""
    name: str
    args: Any
    kwargs: Any
    value: Any
    """A ``Value``, or a tuple or list of them."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The ATen ops that one op of dynamo's graph becomes.

    Attributes:
        ops: in order.
        leaves: where each tensor of its result comes from.
        layouts: of those tensors.
        lies_in: the number of the first input whose memory a tensor of the result shares; -1 for none.
        after: for each input, what stands for that tensor from then on: an op that writes in place takes its place.
    """

    ops: tuple[Op, ...]
    leaves: tuple[Input | Made, ...]
    layouts: tuple[tuple[Any, ...], ...]
    lies_in: tuple[int, ...]
    after: tuple[Input | Made, ...]


class Differs(Exception):
    """This graph cannot be put together from its distinct ops."""


def recipes_of(traced: GraphModule, counts: Sequence[int]) -> list[Recipe]:
    """Read the recipe of each op off the graph that all of them were traced into.

    Args:
        traced: the graph, whose nodes carry the number of their op as stack trace.
        counts: how many tensors each op is given.

    Raises:
        Differs: an op became something that cannot be put together again.
    """
    reference: dict[Node, Input | Made] = {}
    inputs: list[list[Node]] = [[] for _ in counts]
    owners = iter([number for number, count in enumerate(counts) for _ in range(count)])
    made: list[list[Node]] = [[] for _ in counts]
    returned: Sequence[Any] = ()
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            mine = inputs[next(owners)]
            reference[node] = Input(len(mine))
            mine.append(node)
        elif node.op == "output":
            returned = node.args[0]
        else:
            _refuse_unusual(node, traced)
            ops = made[int(node.meta["stack_trace"])]
            reference[node] = Made(len(ops))
            ops.append(node)
    return [_recipe(traced, ops, given, reference, *one) for ops, given, one in zip(made, inputs, returned, strict=True)]


def _refuse_unusual(node: Node, traced: GraphModule) -> None:
    is_plain = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.inplace_view not in node.target.tags
    is_call = node.op == "call_function" and (is_plain or node.target is operator.getitem or _detaches_a_constant(node))
    if not (is_call or _is_empty_constant(node, traced)) or "stack_trace" not in node.meta:
        raise Differs
    if "val" not in node.meta:
        raise Differs  # it returns nothing (`_foreach_add_`): its result does not show which tensors it writes


def _is_empty_constant(node: Node, traced: GraphModule) -> bool:
    """Whether a constant has no numbers, as the keys and values of a cache have before its first token."""
    return node.op == "get_attr" and getattr(traced, str(node.target)).numel() == 0


def _detaches_a_constant(node: Node) -> bool:
    """Whether an op is the last of the three that ``torch.tensor`` becomes: nobody has seen what it changes in place."""
    source = node.args[0] if node.target is torch.ops.aten.detach_.default else None
    return isinstance(source, Node) and source.target is torch.ops.aten.lift_fresh_copy.default and len(source.users) == 1


def _recipe(
    traced: GraphModule, made: Sequence[Node], given: Sequence[Node], reference: Mapping[Node, Input | Made], result: Any,
    after: Sequence[Node],
) -> Recipe:  # fmt: skip
    leaves = _nodes(result)
    places = _storages(given)
    values = [leaf.meta["val"] for leaf in leaves]
    ops: list[Op] = []
    for node in made:
        args, kwargs = mapped(node, reference.__getitem__)
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
        ops.append(Op(target, name, args, kwargs, found))
    return Recipe(
        ops=tuple(ops),
        leaves=tuple(reference[leaf] for leaf in leaves),
        layouts=tuple(layout_of(value) for value in values),
        lies_in=tuple(places.index(key) if (key := tensor_memory.storage_key(value)) in places else -1 for value in values),
        after=tuple(reference[node] for node in after),
    )


def _nodes(result: Any) -> list[Node]:
    if isinstance(result, Node):
        return [result]
    return [node for item in result for node in _nodes(item)] if isinstance(result, tuple | list) else []


def _storages(nodes: Sequence[Node]) -> list[int]:
    return [tensor_memory.storage_key(node.meta["val"]) for node in nodes]


def _value(
    node: Node | None, value: Any, leaves: Sequence[Node], after: Sequence[Node], given: Sequence[Node], made: Sequence[Node]
) -> Value:
    """Say which of the fake tensors at hand an ATen op's result is, or how to make it."""
    if not isinstance(value, torch.Tensor):
        raise Differs
    if node in leaves:
        return Leaf(leaves.index(node))
    if node in after:
        return Input(after.index(node))
    key = tensor_memory.storage_key(value)
    lies_in: Input | Leaf | Made | None = None
    dtype = value.dtype
    for kind, nodes in ((Input, given), (Leaf, leaves)):
        places = _storages(nodes)
        if lies_in is None and key in places:
            lies_in, dtype = kind(places.index(key)), nodes[places.index(key)].meta["val"].dtype
    earlier = [one for one in made if one is not node and isinstance(one.meta["val"], torch.Tensor)]
    if dtype != value.dtype or (lies_in is None and key in _storages(earlier)):
        raise Differs  # never seen: a view of memory that neither comes in nor goes out
    return Between(tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype, value.device, lies_in)


def mapped(node: Node, find: Callable[[Node], Any]) -> Any:
    """Return a node's arguments and keywords with each node in them replaced."""
    return map_arg((node.args, node.kwargs), find)


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors of equal layout agree in."""
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
