"""How much memory a CUDA graph would hold: it is computed from the sizes of the ops before they are recorded.

All graphs of a model share a memory pool: one is replayed at a time, so what lies in between may lie at one place. Results and
copied inputs are each graph's own. The pool gives nothing back before its last graph is gone. So a graph that is found to be too
large once it is recorded has had its memory already. :mod:`fusion_advisor.fuse.cuda_graph.bound` adds graphs up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.fx_nodes import tensors_of
from fusion_advisor.fuse.rewrite.derived_tensors import is_derived
from fusion_advisor.runtime.torch_internals import symbolic_sizes, tensor_memory


class TooLarge(Exception):
    """A graph would by itself hold more than all may.

    Attributes:
        nbytes: that it would hold.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"a graph of it would hold {nbytes} bytes")
        self.nbytes = nbytes


@dataclass(frozen=True, slots=True)
class GraphBytes:
    """What a graph holds.

    Attributes:
        kept: results and copied inputs.
        passing: the most that lies in between at once; smaller graphs share it.
    """

    kept: int
    passing: int

    @property
    def total(self) -> int:
        """What the graph holds where there is no other."""
        return self.kept + self.passing

    def and_inputs(self, nbytes: int) -> GraphBytes:
        """Return the same with copied inputs.

        Args:
            nbytes: of their copies.
        """
        return GraphBytes(self.kept + nbytes, self.passing)


def symbols_given(placeholders: Sequence[Node], given: Sequence[Any]) -> dict[Any, int]:
    """Return the sizes that the symbols of a region stand for in a call.

    Args:
        placeholders: of the region.
        given: the arguments of the call.
    """
    symbols: dict[Any, int] = {}
    for node, value in zip(placeholders, given, strict=False):
        known = node.meta.get("val")
        pairs = zip(known.shape, value.shape, strict=True) if isinstance(known, torch.Tensor) else [(known, value)]
        for size, number in pairs:
            symbol = symbolic_sizes.symbol_of(size)
            if symbol is not None:
                symbols[symbol] = int(number)
    return symbols


def graph_bytes(module: GraphModule, symbols: Mapping[Any, int], left_out: Collection[Node] = ()) -> GraphBytes:
    """Return what the memory that a region's ops make comes to.

    Memory of one op lives until the last op has read it, or a view of it; where nobody reads it, until the graph is recorded.

    Args:
        module: the region.
        symbols: the sizes that its symbols stand for.
        left_out: ops that run after the graph.
    """
    sizes: dict[Any, int] = {}
    nodes = [node for node in module.graph.nodes if node not in left_out]
    is_given = {node: node.op in ("placeholder", "get_attr") or is_derived(node.target) for node in nodes}
    given = {key for node in nodes if is_given[node] for key in _memory(node)}
    own = {node: {key: value for key, value in _memory(node).items() if key not in given} for node in nodes}
    last_read = {key: node for node in nodes for source in (node, *node.all_input_nodes) for key in own.get(source, ())}
    alive: dict[int, int] = {}
    most = 0
    kept: set[int] = set()
    for node in nodes:
        for key, value in own[node].items():
            alive[key] = max(alive.get(key, 0), _bytes_of(value, symbols, sizes))
        most = max(most, sum(alive.values()))
        for key in {key for source in (node, *node.all_input_nodes) for key in own.get(source, ())}:
            if node.op == "output":
                kept.add(key)
            elif last_read[key] is node and key in alive and (node.users or key not in own[node]):
                del alive[key]
    results = sum(alive[key] for key in kept if key in alive)
    return GraphBytes(results, most - results)


def bytes_of_values(nodes: Iterable[Node], symbols: Mapping[Any, int]) -> int:
    """Return what the tensors that some ops make come to."""
    sizes: dict[Any, int] = {}
    return sum(_bytes_of(value, symbols, sizes) for node in nodes for value in _memory(node).values())


def _memory(node: Node) -> dict[int, torch.Tensor]:
    value = node.meta.get("val", node.meta.get("results"))  # one of our kernels with several results has a list of its own
    return {tensor_memory.storage_key(one): one for one in tensors_of(value)}


def _bytes_of(value: torch.Tensor, symbols: Mapping[Any, int], known: dict[Any, int]) -> int:
    """Return the bytes of a tensor's elements, expanded ones once; 0 where a size follows from no input."""
    count = value.element_size()
    for size, step in zip(value.shape, value.stride(), strict=True):
        if isinstance(step, int) and step == 0:
            continue
        expression = symbolic_sizes.expression_of(size)
        if expression not in known:
            is_known = symbolic_sizes.symbols_in(expression) <= symbols.keys()
            known[expression] = int(symbolic_sizes.at_sizes(expression, symbols)) if is_known else 0
        count *= known[expression]
    return count
