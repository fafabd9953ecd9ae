"""Shared values: what several layers compute from the same operands is computed once.

A traced model is written out layer by layer, so what each layer derives for itself (its key positions, a cast of a table, a mask
of its own) stands in the graph once per layer. Two ops give the same value if they are the same op on the same operands, and
nobody wrote to those operands in between; this is shown node by node, from the top. What draws random numbers is never
shared, nor is memory that somebody writes to or that the caller is given: there, two equal tensors are not one.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion_advisor.capture.graph.fx_nodes import storages, written_storages
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.rewrite.record import PassRewrite
from fusion_advisor.runtime.torch_internals import symbolic_sizes

_PLAIN = frozenset({int, bool, type(None), torch.dtype})


def share_values(graph: Graph, _region: Region, _constants: dict[str, torch.Tensor]) -> int:
    """Let equal ops be one op; returns how many that compute something are gone (views cost nothing)."""
    theirs = {key for node in graph.nodes for key in written_storages(node)}
    theirs |= {key for node in graph.nodes if node.op == "output" for source in node.all_input_nodes for key in storages(source)}
    writes: Counter[int] = Counter()
    known: dict[Any, Node] = {}
    gone = 0
    memory = functools.cache(storages)  # no node gets another value here, and each is asked about by all its readers

    @functools.cache
    def read(node: Node) -> tuple[Node, list[int]]:
        source = _itself(node, memory)
        return source, memory(source)

    for node in list(graph.nodes):
        writes.update(written_storages(node))
        if not _is_transparent(node):
            known.clear()
        if not _is_shareable(node) or not theirs.isdisjoint(memory(node)):
            continue
        try:
            key = (node.op, node.target, _frozen((node.args, node.kwargs), writes, read))
            first = known.setdefault(key, node)
        except TypeError:  # an argument that cannot be compared
            continue
        if first is node:
            continue
        gone += bool(node.users) and not _is_view(node)
        node.replace_all_uses_with(first)
        graph.erase_node(node)
    return gone


def _is_transparent(node: Node) -> bool:
    """Whether an op means the same before and after this node: entering autocast, say, changes what the next ones compute."""
    if node.op != "call_function" or node.target is operator.getitem or isinstance(node.target, torch._ops.OpOverload):
        return True
    return "fusion_id" in node.meta or str(getattr(node.target, "__module__", "")).startswith("fusion_advisor.")


def _is_shareable(node: Node) -> bool:
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or not storages(node):
        return False
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def _is_view(node: Node) -> bool:
    read = {key for source in node.all_input_nodes for key in storages(source)}
    return node.op == "get_attr" or read.issuperset(storages(node))


def _frozen(value: Any, writes: Counter[int], read: Callable[[Node], tuple[Node, list[int]]]) -> Any:
    """Return a key that is equal for equal arguments: 1, 1.0 and True are not, nor are 0.0 and -0.0.

    ``read`` returns the node whose value another one stands for (:func:`_itself`), and its storages.
    """
    if type(value) in _PLAIN:  # asked first: most arguments are numbers
        return (type(value), value)
    if isinstance(value, Node):
        source, keys = read(value)
        return (source, *(writes.get(key, 0) for key in keys))
    if isinstance(value, tuple | list):
        return (list, *(_frozen(item, writes, read) for item in value))
    if isinstance(value, dict):
        return (dict, *((name, _frozen(value[name], writes, read)) for name in sorted(value)))
    if isinstance(value, slice):
        return (slice, _frozen((value.start, value.stop, value.step), writes, read))
    return (type(value), repr(value) if isinstance(value, float | complex) else value)


def _itself(node: Node, memory: Callable[[Node], list[int]]) -> Node:
    """Return what a node that changes nothing (``to`` of the dtype that is there already) was given.

    ``memory`` returns a node's storages.
    """
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        source = node.all_input_nodes[0]
        if memory(node) != memory(source) or written_storages(node):  # asked first: it is quick, and says no to most
            break
        ours, theirs = node.meta.get("val"), source.meta.get("val")
        if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor) or not _is_in_place_of(ours, theirs):
            break
        node = source
    return node


def _is_in_place_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of one storage are the same elements in the same order; most are not, and differ in a size."""
    if one.dim() != other.dim() or one.dtype != other.dtype or _sizes(one.shape) != _sizes(other.shape):
        return False
    return _place(one) == _place(other)


def _place(value: torch.Tensor) -> tuple[Any, ...]:
    layout = _sizes((*value.stride(), value.storage_offset()))
    return (*layout, value.device, value.is_conj(), value.is_neg())


def _sizes(sizes: Iterable[Any]) -> list[Any]:
    """Return sizes that compare equal without a guard on those that are open."""
    return [symbolic_sizes.expression_of(size) for size in sizes]


SHARE_VALUES = PassRewrite(id="share-values", title="shared values", apply=share_values)
