"""Find linear recurrences that a Python loop unrolled into a graph: ``h = a[:, t] * h + b[:, t]``, once for each step.

A loop's ops are its states, what reads them until one ``stack`` or ``cat`` gathers a row of each step, and the ops that only
prepare one step (``a[:, t]``). Each part of the search looks at each op a fixed number of times.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fusion_advisor.capture.graph.fx_nodes import storages, tensors_of

_aten = torch.ops.aten
LEAST_STEPS = 48
"""Shorter loops stay op by op: at about six ops a step they become a few chains, each with a kernel of its own."""
_CASTS = frozenset({_aten.to.dtype, _aten._to_copy.default, _aten.type_as.default})
_GATHERS = frozenset({_aten.stack.default, _aten.cat.default})
_PARTS = frozenset({_aten.unbind.int, _aten.split.Tensor, _aten.chunk.default, _aten.split_with_sizes.default})
"""Views that hand out all steps at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """An unrolled loop in a graph.

    Attributes:
        states: the op that makes each step's state, in order.
        members: all ops of the loop, in order.
        inputs: ops outside whose tensors it reads.
        outputs: ops of the loop that are read outside, the gathered rows first.
    """

    states: tuple[Node, ...]
    members: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


def find_recurrences(graph: Graph, least_steps: int = LEAST_STEPS) -> list[Recurrence]:
    """Return the unrolled linear recurrences of a graph; no op is in two of them.

    Args:
        graph: of ATen ops, with a tensor in each node's ``val``.
        least_steps: loops of fewer steps are not looked at.
    """
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    found: list[Recurrence] = []
    taken: set[Node] = set()
    for states in _chains(nodes, least_steps):
        one = _recurrence(nodes, place, states, taken) if taken.isdisjoint(states) else None
        if one is not None and taken.isdisjoint(one.members):
            taken.update(one.members)
            found.append(one)
    return found


def _chains(nodes: Sequence[Node], least_steps: int) -> Iterator[tuple[Node, ...]]:
    """Yield each longest row of states in which each is a product of the one before plus something."""
    length: dict[Node, int] = {}
    before: dict[Node, Node] = {}
    for node in nodes:
        factors = [factor for product in _read(node, _aten.add.Tensor) for factor in _read(product, _aten.mul.Tensor)]
        if factors:
            before[node] = max(factors, key=lambda factor: length.get(factor, 0))
            length[node] = length.get(before[node], 0) + 1
    continued = set(before.values())
    for node, steps in length.items():
        if steps >= least_steps and node not in continued:
            states = [node]
            while before[states[-1]] in before:
                states.append(before[states[-1]])
            yield tuple(reversed(states))


def _read(node: Node, op: torch._ops.OpOverload) -> list[Node]:
    """Return the two tensors that a sum or a product reads, casts left out; nothing of another op or of a scaled sum."""
    if node.target is not op or node.kwargs or len(node.args) != 2:
        return []
    return [_uncast(source) for source in node.args if isinstance(source, Node)]


def _uncast(node: Node) -> Node:
    while node.target in _CASTS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _recurrence(
    nodes: Sequence[Node], place: Mapping[Node, int], states: tuple[Node, ...], taken: set[Node]
) -> Recurrence | None:
    """Return the loop that makes some states; None where it is not linear, or something outside needs it step by step."""
    gather, reached = _reached(nodes[place[states[0]] :], states)
    if gather is None:
        return None
    core = {gather}
    for node in reversed(nodes[place[states[0]] : place[gather]]):
        if node in reached and not core.isdisjoint(node.users):
            core.add(node)
    prepared = _prepared(nodes[: place[gather]], core, taken, least=len(states) // 2)
    members = tuple(sorted(core | prepared, key=place.__getitem__))
    inside = set(members)
    inputs = tuple(dict.fromkeys(source for node in members for source in node.all_input_nodes if source not in inside))
    outputs = [gather, *(node for node in members if node is not gather and not inside.issuperset(node.users))]
    outside = [user for node in outputs for user in node.users if user not in inside]
    is_late = all(place[user] > place[gather] for user in outside)
    is_alone = all(map(_is_pure, nodes[place[members[0]] : place[gather] + 1]))
    tensors = all(isinstance(node.meta.get("val"), torch.Tensor) for node in (*inputs, *outputs))
    own = [key for node in outputs for key in storages(node)]
    shares = len(own) != len(set(own)) or not set(own).isdisjoint(key for node in inputs for key in storages(node))
    if len(outputs) > 2 or not is_late or not is_alone or not tensors or shares:
        return None
    return Recurrence(states=states, members=members, inputs=inputs, outputs=tuple(outputs))


def _reached(nodes: Iterable[Node], states: tuple[Node, ...]) -> tuple[Node | None, set[Node]]:
    """Return the op that gathers a row of each step, and the ops that depend on a state; no op where the loop is not linear."""
    number = {state: step for step, state in enumerate(states)}
    reached: set[Node] = set()
    for node in nodes:
        sources = [source for source in node.all_input_nodes if source in reached]
        step = number.get(node)
        if step is not None and step > 0 and not _is_linear(node, states[step - 1], reached):
            return None, reached
        if node.target in _GATHERS and len(sources) >= len(states) // 2:
            return node, reached
        if step is not None or sources:
            reached.add(node)
    return None, reached


def _is_linear(state: Node, before: Node, reached: set[Node]) -> bool:
    """Whether a state is the one before times something plus something, where neither depends on any state."""
    terms = [source for source in state.args if isinstance(source, Node) and source in reached]
    if len(terms) != 1 or len(state.args) != 2:
        return False
    factors = [source for source in _uncast(terms[0]).args if isinstance(source, Node) and source in reached]
    return len(factors) == 1 and _uncast(factors[0]) is before


def _prepared(nodes: Sequence[Node], core: set[Node], taken: set[Node], *, least: int) -> set[Node]:
    """Return the ops that only the loop reads and that come once for each step, with the views that hand out all steps."""

    def only_read_inside(wanted: Mapping[object, int] | None) -> list[Node]:
        inside = set(core)
        found = []
        for node in reversed(nodes):
            is_wanted = wanted is None or wanted[_kind(node)] >= least or node.target in _PARTS
            is_op = node.op == "call_function" and node not in core and node not in taken
            if is_op and is_wanted and node.users and inside.issuperset(node.users) and _is_pure(node):
                inside.add(node)
                found.append(node)
        return found

    found = set(only_read_inside(Counter(map(_kind, (*core, *only_read_inside(None))))))
    return {node for node in found if node.target is not operator.getitem or found.issuperset(node.all_input_nodes)}


def _kind(node: Node) -> object:
    return (node.target, tuple((tuple(value.shape), value.dtype) for value in tensors_of(node.meta.get("val"))))


def _is_pure(node: Node) -> bool:
    """Whether an op writes nothing, draws no random numbers and switches nothing."""
    if node.op != "call_function" or node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return str(getattr(node.target, "__module__", "")).startswith("fusion_advisor.")
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags
