"""The ops that run after a CUDA graph, outside it: a region's last matrix product, and its last copies.

A graph writes to the same memory at each replay, so each result is copied for the caller: for the logits of Qwen2.5-7B, 2,048
tokens, 622 MB are read and written, 300 µs. A result that the region makes last of all, by one product of a hidden state and a
weight, needs no copy where the product runs after the graph, launched like any op, into memory that the caller keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.capture.graph.fx_nodes import is_in_autocast, module_path, storages, written_storages
from fusion_advisor.capture.sizes.size_nodes import mapped
from fusion_advisor.fuse.cuda_graph.graph_bytes import symbols_given
from fusion_advisor.fuse.rewrite.layout_copy import PlainCopy
from fusion_advisor.fuse.rewrite.odd_width_gemm import OddRows
from fusion_advisor.records.op_facts import PRODUCTS
from fusion_advisor.runtime.torch_internals import symbolic_sizes

LEAST_BYTES = 4 << 20
"""A copy of fewer takes under 2 µs on an H200, hardly longer than the smallest kernel, and a product that is launched by itself
begins a microsecond or two after the graph has ended: nothing is left to save. So a decode step's logits (0.3 MB for 152,064
words) stay inside."""

_aten = torch.ops.aten
_PRODUCTS = tuple(getattr(_aten, name).default for name in PRODUCTS)

MakeResult = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A result whose last ops a graph leaves out.

    Attributes:
        make: makes it from what the graph leaves, and from the region's inputs named by ``slots``.
        stand_ins: each op that is left out, with the one whose value stands for it: what the graph leaves.
        slots: places of the inputs that ``make`` takes.
        name: of the product, for reports; empty for a copy.
    """

    make: MakeResult
    stand_ins: Mapping[Node, Node]
    slots: tuple[int, ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True)
class LastProduct:
    """A large product that a graph makes last of all.

    Attributes:
        hidden: the value of the graph's own that it reads; all else is given to the graph.
        ops: the product and the views of it, in order; the last one is the result.
    """

    hidden: Node
    ops: tuple[Node, ...]


def as_it_is(memory: torch.Tensor) -> torch.Tensor:
    """Copy a result with its strides."""
    return memory.clone(memory_format=torch.preserve_format)


def contiguous(memory: torch.Tensor) -> torch.Tensor:
    """Copy a result to plain strides."""
    return memory.clone(memory_format=torch.contiguous_format)


def left_out(module: GraphModule, copied: Sequence[int], given: Sequence[Any] = ()) -> dict[int, LeftOut]:
    """Return the results, by place, that are made or copied after the graph.

    Args:
        module: the region.
        copied: places of the inputs that are copied into static tensors: a product of one of those stays inside.
        given: the inputs that it is recorded for; a region with open sizes needs them.
    """
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    results = output.args[0] if isinstance(output.args[0], tuple | list) else [output.args[0]]
    theirs = {key for node in module.graph.nodes if node.op in ("placeholder", "get_attr") for key in storages(node)}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    numbers = _numbers(module, dict(zip(placeholders, given, strict=False)))
    inputs = {node: slot for slot, node in enumerate(placeholders) if slot not in copied and node not in numbers}
    found = {}
    for place, result in enumerate(results):
        if not isinstance(result, Node) or len(result.users) > 1 or results.count(result) > 1:
            continue
        made = _last_copy(module, result, theirs) or _product_behind(module, result, inputs, numbers)
        if made is not None:
            found[place] = made
    return found


def _last_copy(module: GraphModule, result: Node, theirs: set[int]) -> LeftOut | None:
    """A copy to plain strides of the region's own memory, which is not written to later."""
    is_clone = result.target is _aten.clone.default and result.kwargs == {"memory_format": torch.contiguous_format}
    if not (isinstance(result.target, PlainCopy) or is_clone):
        return None
    (source,) = result.all_input_nodes
    if (theirs | _written_behind(module.graph, result)).intersection(storages(source)):
        return None
    return LeftOut(make=result.target if isinstance(result.target, PlainCopy) else contiguous, stand_ins={result: source})


def _numbers(module: GraphModule, given: Mapping[Node, Any]) -> dict[Node, int]:
    """Return what a region's open sizes are in the call that is recorded: a recording is of one exact shape."""
    symbols = symbols_given([*given], [*given.values()])
    sizes = {node: symbolic_sizes.expression_of(node.meta.get("val")) for node in module.graph.nodes}
    open_sizes = {node: size for node, size in sizes.items() if symbolic_sizes.is_size(node.meta.get("val"))}
    return {
        node: symbolic_sizes.at_sizes(size, symbols)
        for node, size in open_sizes.items()
        if symbolic_sizes.symbols_in(size) <= symbols.keys()
    }


def _product_behind(
    module: GraphModule, result: Node, inputs: Mapping[Node, int], numbers: Mapping[Node, int]
) -> LeftOut | None:  # fmt: skip
    found = last_product(module.graph, result, inputs, numbers)
    if found is None:
        return None
    product, *views = found.ops
    others = [source for source in _tensors_of(product, numbers) if source is not found.hidden]
    stand_ins = {product: found.hidden, **{view: _tensors_of(view, numbers)[0] for view in views}}
    return LeftOut(
        make=_function([found.hidden, *others], found.ops, numbers), stand_ins=stand_ins,
        slots=tuple(inputs[source] for source in others), name=module_path(product) or product.name,
    )  # fmt: skip


def last_product(
    graph: Graph, result: Node, inputs: Collection[Node], numbers: Mapping[Node, int] = MappingProxyType({}),
    kinds: tuple[type, ...] = (OddRows,),
) -> LastProduct | None:  # fmt: skip
    """Return the large product that a result is, or is a view of; None where it must stay in a CUDA graph.

    It reads one value of the graph's own, and inputs. None of them is written to later.

    Args:
        graph: which makes the result.
        result: that nothing else reads.
        inputs: tensors that are given to the graph and not copied into it.
        numbers: open sizes of the graph, with their values.
        kinds: classes of calls that count as products; ATen's products always do.
    """
    views: list[Node] = []
    product = result
    while _is_view(product, numbers):
        views.append(product)
        (product,) = _tensors_of(product, numbers)
        if len(product.users) > 1:
            return None
    if product.target not in _PRODUCTS and not isinstance(product.target, kinds):
        return None
    operands = _tensors_of(product, numbers)
    own = [source for source in operands if source not in inputs]
    if _bytes_of(product, numbers) < LEAST_BYTES or len(own) != 1 or own[0].op != "call_function":
        return None
    (hidden,) = own
    theirs = {key for node in graph.nodes if node.op in ("placeholder", "get_attr") for key in storages(node)}
    read = {key for source in operands for key in storages(source)}
    if theirs.intersection(storages(hidden)) or read & _written_behind(graph, product) or is_in_autocast(product):
        return None
    return LastProduct(hidden, (product, *reversed(views)))


def _tensors_of(node: Node, numbers: Mapping[Node, int]) -> list[Node]:
    """Return the inputs of an op but for sizes."""
    return [source for source in node.all_input_nodes if source not in numbers]


def _bytes_of(node: Node, numbers: Mapping[Node, int]) -> int:
    """Return how many bytes an op's result has in the call that is recorded."""
    value = node.meta["val"]
    symbols = {symbolic_sizes.symbol_of(size.meta["val"]): number for size, number in numbers.items()}
    count = math.prod(symbolic_sizes.at_sizes(symbolic_sizes.expression_of(size), symbols) for size in value.shape)
    return int(count) * int(value.element_size())


def _is_view(node: Node, numbers: Mapping[Node, int]) -> bool:
    """Whether an op of ATen's gives nothing but its one tensor in other sizes."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    sources = _tensors_of(node, numbers)
    return len(sources) == 1 and isinstance(node.meta.get("val"), torch.Tensor) and storages(node) == storages(sources[0])


def _written_behind(graph: Graph, node: Node) -> set[int]:
    """What the ops after one write to."""
    later = list(graph.nodes)
    return {key for other in later[later.index(node) + 1 :] for key in written_storages(other)}


def _function(operands: Sequence[Node], ops: Sequence[Node], numbers: Mapping[Node, int]) -> Callable[..., Any]:
    """Return ops as a function of the values of ``operands``; the last one's value is returned."""
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in operands}

    def known(value: Any) -> Any:
        return numbers.get(value, copies.get(value)) if isinstance(value, Node) else value

    for node in ops:
        copy = graph.create_node(node.op, node.target, mapped(node.args, known), mapped(node.kwargs, known), node.name)
        copies[node] = copy
    graph.output(copies[ops[-1]])
    forward: Callable[..., Any] = GraphModule(torch.nn.Module(), graph).forward
    return forward
